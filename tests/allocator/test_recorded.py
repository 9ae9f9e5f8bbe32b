"""The allocator model against what PyTorch's own allocator did, byte for byte.

libc10_cuda.so of PyTorch 2.11 to 2.15 did the same operations with a CUDA runtime that only hands
out addresses; only the addresses and the device's size are not CUDA's (tests/recordings/allocator/record.py).
"""

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.trace_diff.replay import replay
from harness.allocator import Allocator, AllocatorOutOfMemory, Settings, parse_settings
from harness.allocator.addresses import kRoundLarge
from harness.allocator.memory_stats import memory_stats, reset_peak_memory_stats, snapshot_segments
from tests.recordings.allocator.record import RECORDED

CASES = json.loads(gzip.decompress(RECORDED.read_bytes()))
RECORDINGS = [
    pytest.param(case, recording, version, id=f"{number}-{version.split('+')[0]}")
    for number, case in enumerate(CASES)
    for recording in case["recordings"]
    for version in recording["torch"]
]
COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def rows(stats: dict[str, int]) -> dict[str, list[int]]:
    """memory_stats in the form of the recording."""
    names = {name.rpartition(".")[0] for name in stats if "." in name}
    made = {
        name: [stats[f"{name}.{key}"] for key in ("current", "peak", "allocated", "freed")] for name in names
    }
    return made | {"counts": [stats[name] for name in COUNTS]}


def lines(allocator: Allocator) -> list[list[Any]]:
    """snapshot_segments in the form of the recording."""
    made: list[list[Any]] = []
    for segment in snapshot_segments(allocator):
        sizes = [segment[f"{name}_size"] for name in ("total", "allocated", "active", "requested")]
        flags = [int(segment["segment_type"] == "large"), int(segment["is_expandable"])]
        made.append(["G", segment["address"], *sizes, segment["stream"], *flags])
        for block in segment["blocks"]:
            allocated = int(block["state"] == "active_allocated")
            made.append(["B", block["size"], block["requested_size"], allocated, allocated])
    return made


def perform(case: dict[str, Any], settings: Settings, new_address: Callable[[int], int]) -> dict[str, Any]:
    """Do a case's operations with the model and write down the same things as record.py."""
    trace: list[Any] = []
    stats: list[Any] = []
    segments: list[Any] = []
    allocator = Allocator(
        settings,
        case["capacity_bytes"],
        case["device_bytes"],
        lambda *event: trace.append(list(event)),
        new_address,
    )
    blocks: list[Any] = []
    for operation, *words in case["operations"]:
        if operation == "m":
            size, stream = words
            try:
                blocks.append(allocator.malloc(size, stream))
                trace.append(["alloc", blocks[-1].address, size, stream])
            except AllocatorOutOfMemory:
                blocks.append(None)
        elif operation == "f" and (block := blocks[words[0]]) is not None:
            event = [block.address, block.requested_size, block.pool.stream]
            trace += [["free_requested", *event], ["free_completed", *event]]
            allocator.free(block)
        elif operation == "e":
            allocator.empty_cache()
        elif operation == "p":
            reset_peak_memory_stats(allocator)
        elif operation == "s":
            stats.append(rows(memory_stats(allocator)))
        elif operation == "n":
            trace.append(["snapshot", 0, allocator.allocated_bytes, 0])
            segments.append(lines(allocator))
    return {"trace": trace, "stats": stats, "segments": segments}


def one_after_the_other() -> Callable[[int], int]:
    """Addresses from the first one on, of whole pages."""
    ends = [0x7F0000000000]

    def new_address(size: int) -> int:
        ends.append(ends[-1] + -(-size // kRoundLarge) * kRoundLarge)
        return ends[-2]

    return new_address


def test_the_recordings_cover_what_can_happen() -> None:
    assert len(CASES) >= 28
    versions = {
        version.split("+")[0] for case in CASES for each in case["recordings"] for version in each["torch"]
    }
    assert versions == {"2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0"}
    actions = {event[0] for case in CASES for each in case["recordings"] for event in each["trace"]}
    assert {"segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"} < actions
    assert any(len(case["recordings"]) == 3 for case in CASES)  # the three orders of equally large blocks


@pytest.mark.parametrize(("case", "recording", "version"), RECORDINGS)
def test_the_model_does_what_pytorch_did(
    case: dict[str, Any], recording: dict[str, Any], version: str
) -> None:
    given = iter([event[1] for event in recording["trace"] if event[0] == "segment_alloc"])
    # Expandable segments, which a recording does not name as a whole, have addresses one after the other.
    new_address = one_after_the_other() if case["addresses"] == "up" else lambda size: next(given)
    made = perform(case, parse_settings(case["settings"], version), new_address)
    assert made["trace"] == recording["trace"]
    assert made["stats"] == recording["stats"]
    assert made["segments"] == recording["segments"]


def entries(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """A recording as torch.cuda.memory._snapshot()["device_traces"][0] has it."""
    return [
        {
            "action": action,
            "device_free" if action == "oom" else "addr": place,
            "size": size,
            "stream": stream,
        }
        for action, place, size, stream in recording["trace"]
    ]


# With the others a replay cannot tell every empty_cache() from a failed cudaMalloc.
REPLAYED = [
    each
    for each in RECORDINGS
    if not {"max_split_size_mb", "garbage_collection_threshold"}
    & set(re.split("[:,]", each.values[0]["settings"]))
]


@pytest.mark.parametrize(("case", "recording", "version"), REPLAYED)
def test_a_replay_needs_nothing_but_the_trace(
    case: dict[str, Any], recording: dict[str, Any], version: str
) -> None:
    replayed = replay(entries(recording), parse_settings(case["settings"], version), case["device_bytes"])
    assert replayed.divergence is None
    assert replayed.requests == sum(
        event[0] in ("alloc", "free_completed", "oom") for event in recording["trace"]
    )
    now, then = rows(memory_stats(replayed.allocator)), recording["stats"][-1]
    for name in ("allocated_bytes.all", "requested_bytes.all", "reserved_bytes.all", "segment.all"):
        assert now[name][0] == then[name][0]
    assert lines(replayed.allocator) == recording["segments"][-1]


def training() -> tuple[list[dict[str, Any]], Settings]:
    case = next(case for case in CASES if not case["settings"] and case["capacity_bytes"] > 2**36)
    return entries(case["recordings"][0]), parse_settings("", case["recordings"][0]["torch"][0])


def test_a_replay_names_the_first_divergence() -> None:
    trace, settings = training()
    lost = next(
        index for index, entry in enumerate(trace) if entry["action"] == "segment_alloc" and index > 20
    )
    divergence = replay([*trace[:lost], *trace[lost + 1 :]], settings).divergence
    assert divergence is not None
    assert divergence.index == lost  # the alloc that the lost segment was for
    assert "needs new memory" in divergence.problem
    assert divergence.before[-1][0] == "alloc"
    assert len(divergence.before) == 10


@pytest.mark.parametrize(
    ("which", "action", "changed", "noticed"),
    [(0, "segment_alloc", {"size": 2**21}, 1), (-1, "alloc", {"addr": 512}, 0)],
    ids=["a segment of another size", "the wrong block"],
)
def test_a_replay_notices(which: int, action: str, changed: dict[str, int], noticed: int) -> None:
    """A larger segment by the first request that it was made for."""
    trace, settings = training()
    index = [index for index, entry in enumerate(trace) if entry["action"] == action][which]
    trace[index] = trace[index] | {name: trace[index][name] + more for name, more in changed.items()}
    divergence = replay(trace, settings).divergence
    assert divergence is not None
    assert divergence.index == index + noticed


def test_a_replay_notices_the_wrong_settings() -> None:
    trace, _ = training()
    assert replay(trace, parse_settings("expandable_segments:True")).divergence is not None
    assert replay(trace, parse_settings("large_segment_size_mb:40")).divergence is not None


def test_a_recording_that_began_too_late_is_named() -> None:
    trace, settings = training()
    first_free = next(index for index, entry in enumerate(trace) if entry["action"] == "free_completed")
    divergence = replay([trace[first_free]], settings).divergence
    assert divergence is not None
    assert "record from the start" in divergence.problem


def test_an_action_that_is_not_known_is_not_passed_over() -> None:
    entry = {"action": "segment_grow", "addr": 0, "size": 512, "stream": 0}
    found = replay([entry], Settings()).divergence
    assert found is not None
    assert found.problem == "unknown action 'segment_grow'"
