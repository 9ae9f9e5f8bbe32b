"""Whether a recorded allocator did with its segments what the model of it does. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, get_args

from harness.allocator import Replay, parse_settings, replay
from harness.errors import InputError
from harness.system import FreeBlockOrder


@dataclass(frozen=True)
class Reserved:
    """The segments of one pool at the end of a recording."""

    count: int
    total_bytes: int
    allocated_bytes: int


class SegmentDiff(NamedTuple):
    """Segments at the end, by pool (small, large), and what a replay of the recorded requests gave."""

    real: dict[str, Reserved]
    simulated: dict[str, Reserved]
    replayed_requests: int
    replay_problem: str | None
    """Where the model left the recording, None if it never did."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "real": {pool: asdict(reserved) for pool, reserved in self.real.items()},
            "simulated": {pool: asdict(reserved) for pool, reserved in self.simulated.items()},
            "replayed_requests": self.replayed_requests,
            "replay_problem": self.replay_problem,
        }


def diff_segments(real: Mapping[str, Any], simulated: Mapping[str, Any], device: int) -> SegmentDiff:
    """Compare two snapshots: the segments of the real one's `device`, all of the simulated one's."""
    outcome = _replayed(real, device)
    if isinstance(outcome, str):
        requests, problem = 0, outcome
    else:
        there = outcome.divergence
        requests = outcome.requests
        problem = None if there is None else f"at trace entry {there.index}: {there.problem}"
    return SegmentDiff(
        real=_reserved(segment for segment in real["segments"] if segment.get("device", 0) == device),
        simulated=_reserved(simulated["segments"]),
        replayed_requests=requests,
        replay_problem=problem,
    )


def _replayed(snapshot: Mapping[str, Any], device: int) -> Replay | str:
    """The replay that got furthest, or why there is none.

    A snapshot does not say which PyTorch wrote it, and versions rank equally large free blocks differently.
    """
    stated: Mapping[str, str] = snapshot.get("allocator_settings") or {}
    try:
        settings = parse_settings(stated.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    except InputError as error:
        return f"its settings cannot be simulated: {error}"
    trace = _with_addresses(snapshot["device_traces"][device])
    replays = (replay(trace, replace(settings, free_block_order=order)) for order in get_args(FreeBlockOrder))
    return max(replays, key=lambda done: (done.divergence is None, done.requests))


def _with_addresses(trace: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """An entry about running out of memory has the device's free bytes in the address's place."""
    return [
        entry if "addr" in entry else {**entry, "addr": entry["device_free"]}
        for entry in trace
        if entry["action"] != "snapshot"
    ]


def _reserved(segments: Iterable[Mapping[str, Any]]) -> dict[str, Reserved]:
    pools: dict[str, Reserved] = {}
    for segment in segments:
        pool = segment.get("segment_type", "unknown")
        so_far = pools.get(pool, Reserved(0, 0, 0))
        in_use = sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
        pools[pool] = Reserved(
            so_far.count + 1,
            so_far.total_bytes + segment["total_size"],
            so_far.allocated_bytes + in_use,
        )
    return pools
