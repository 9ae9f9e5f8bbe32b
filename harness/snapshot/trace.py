"""Allocation spans from the trace in a CUDA memory snapshot (torch.cuda.memory._snapshot()).

The trace is a list of entries with action, addr, size, time_us, frames and user_metadata. Their sizes
are what was *requested*; torch's allocated_bytes counts blocks, so sizes are turned into block sizes.
This module imports no torch.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan

MIN_BLOCK_BYTES = 512
"""kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp: every block is a multiple of it."""
_FREES = ("free_requested", "free_completed")
_METADATA = re.compile(r"(?:step=(-?\d+) )?phase=(\w+)")


class Label(NamedTuple):
    """What the memory at an address is, at one moment."""

    address: int
    """Address of the storage (untyped_storage().data_ptr()), not of a view into it."""
    category: str
    module: str | None = None
    time_us: int | None = None
    """When it was seen there: microseconds since 1970, as time.time_ns() // 1000. None: as the trace ends.
    Addresses are reused, so what dies within the recording (gradients, inputs) needs the moment."""


def phase_metadata(phase: str, step: int | None = None) -> str:
    """The text to give to torch.cuda.memory._set_memory_metadata at the start of a phase."""
    return f"phase={phase}" if step is None else f"step={step} phase={phase}"


@lru_cache(maxsize=1024)
def phase_of(metadata: str) -> str | None:
    """The phase named by `phase_metadata`; None for any other text."""
    match = _METADATA.fullmatch(metadata)
    return match[2] if match else None


@lru_cache(maxsize=1024)
def step_of(metadata: str) -> int | None:
    """The number of the step named by `phase_metadata`; None if there is none. Setup is step -1."""
    match = _METADATA.fullmatch(metadata)
    return int(match[1]) if match and match[1] is not None else None


def step_ends(trace: Sequence[Mapping[str, Any]]) -> list[int]:
    """The index of the last entry of each step in the trace, in their order. Setup, step -1, is none."""
    ends: dict[int, int] = {}
    for index, stated in enumerate(stated_phases(trace)):
        step = step_of(stated)
        if step is not None and step >= 0:
            ends[step] = index
    return list(ends.values())


def stated_phases(trace: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metadata that applies to each entry.

    torch keeps the metadata per thread, and autograd runs CUDA backward in a thread of its own, where
    it is empty. While that thread runs, the one that called backward() waits, having just allocated the
    root gradient: so an entry without metadata belongs to the last one stated.
    """
    stated = ""
    return [stated := entry.get("user_metadata") or stated for entry in trace]


def spans_from_trace(
    trace: Sequence[Mapping[str, Any]],
    labels: Iterable[Label] = (),
    segments: Iterable[Mapping[str, Any]] = (),
    round_to_bytes: int = MIN_BLOCK_BYTES,
    phases: Sequence[str | None] | None = None,
) -> list[AllocationSpan]:
    """The allocations of one device: `trace` is snapshot["device_traces"][device].

    An allocation ends when its free is requested, as torch's "allocated" has it. `segments` are the
    same snapshot's (of this device): they add the blocks that were never allocated or freed within the
    trace, and give the exact size of those still live. The rest is rounded up to `round_to_bytes`, which
    leaves out what the allocator did not split off: up to 1 MiB of a large block. In a trace of storages,
    which are not rounded, it is 1.
    The first label of an allocation holds, and the first module that one of them names; one whose address
    is not live at its moment is not on this device and is passed over. `born` and `died` index the trace.
    `phases`: the phase of every entry, to be used instead of what its metadata states (from_stacks.py). A
    recording may leave actions out (skip_actions): an allocation without a requested free ends with the
    completed one, or when its address is given again.
    """
    if phases is None:
        phases = [phase_of(stated) for stated in stated_phases(trace)]

    def block_size(requested_bytes: int) -> int:
        return max(1, -(-requested_bytes // round_to_bytes)) * round_to_bytes

    spans: list[AllocationSpan] = []
    live: dict[int, AllocationSpan] = {}
    for index, (entry, phase) in enumerate(zip(trace, phases, strict=True)):
        action = entry["action"]
        if action == "alloc":
            size = block_size(entry["size"])
            frames = entry.get("frames", ())
            span = AllocationSpan(entry["addr"], size, index, birth_phase=phase, frames=frames)
            before = live.get(span.address)
            if before is not None:
                before.died, before.death_phase = index, phase
            live[span.address] = span
            spans.append(span)
        elif action in _FREES:
            span = live.pop(entry["addr"], None)
            if span is None and action == "free_completed":
                continue  # its free was requested before, perhaps before the recording
            if span is None:
                size = block_size(entry["size"])
                span = AllocationSpan(entry["addr"], size, BEFORE_RECORDING)
                spans.append(span)
            span.died, span.death_phase = index, phase
    for address, block in allocated_blocks(segments):
        span = live.get(address)
        if span is None:
            frames = block.get("frames", ())
            spans.append(AllocationSpan(address, block["size"], BEFORE_RECORDING, frames=frames))
        else:
            span.size_bytes = block["size"]
    _apply(labels, spans, [entry.get("time_us", 0) for entry in trace])
    return spans


def _apply(labels: Iterable[Label], spans: Iterable[AllocationSpan], times_us: list[int]) -> None:
    at_address: dict[int, list[AllocationSpan]] = {}
    for span in spans:
        at_address.setdefault(span.address, []).append(span)
    for label in labels:
        moment = len(times_us) if label.time_us is None else bisect_right(times_us, label.time_us)
        for span in at_address.get(label.address, ()):
            if span.live_at(moment - 1):
                span.category = span.category or label.category
                span.module = span.module or label.module


def allocated_blocks(segments: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Every block of these segments that a program holds, with its address."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield address, block
            address += block["size"]
