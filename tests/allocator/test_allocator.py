"""The allocator model: what the recordings of PyTorch's allocator (test_recorded.py) do not hold.

Sizes at the very edge of a rule, worked by hand from CUDACachingAllocator.cpp, and what is said. MiB = 2**20.
"""

from typing import Any

import pytest
from torch.cuda import _memory_viz

from harness.allocator import Allocator, AllocatorOutOfMemory, parse_settings
from harness.allocator.memory_stats import memory_stats, snapshot_segments

KiB, MiB = 2**10, 2**20


def made(text: str = "", **arguments: Any) -> tuple[Allocator, list[tuple[str, int]]]:
    """An allocator, and the list that it writes its segment events to: (action, size)."""
    events: list[tuple[str, int]] = []
    allocator = Allocator(
        parse_settings(text),
        on_event=lambda action, address, size, stream: events.append((action, size)),
        **arguments,
    )
    return allocator, events


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        # 10 MiB + 512 takes 12 MiB from the device. The rest, 2 MiB - 512, is more than 1 MiB: it is cut off.
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # the rest is exactly 1 MiB: kept
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),
    ],
)
def test_what_one_request_takes(requested: int, block: int, segment: int) -> None:
    allocator, events = made()
    assert allocator.malloc(requested).size == block
    assert events == [("segment_alloc", segment)]
    assert memory_stats(allocator)["requested_bytes.all.current"] == requested


def test_nothing_cannot_be_allocated_or_freed_twice() -> None:
    allocator, _ = made()
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.malloc(0)
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        # The example in PyTorch's source, in KiB: 1200 is between 1024 and 2048; in 4 parts: 1024, 1280, ...
        ("4", 1200 * KiB, 1280 * KiB),
        ("4", 1280 * KiB, 1280 * KiB),
        ("4", 2048 * KiB, 2048 * KiB),
        ("4", 2000, 2048),  # up to 512 * 4 the multiples of 512 stay
        ("4", 2049, 2560),  # 2048 / 4 = 512: the next step is 2048 + 512
        ("[1:2,4:8]", 5 * MiB, 5 * MiB),  # 4 MiB / 8 = 0.5: a step
        ("[1:2,4:8]", 5 * MiB + 1, 5 * MiB + 512 * KiB),
        ("[1:2,4:8]", 3 * MiB, 3 * MiB),  # 2 MiB was left out of the list: multiples of 512
        ("[1:2,4:8]", 3 * MiB + 1, 3 * MiB + 512),
        ("[1:2,4:8]", 700 * KiB, 768 * KiB),  # the first entry holds below 1 MiB too: 512, 768, 1024
    ],
)
def test_roundup_power2_divisions(divisions: str, size: int, rounded: int) -> None:
    allocator, _ = made(f"roundup_power2_divisions:{divisions}")
    assert allocator.malloc(size).size == rounded


def test_out_of_memory_says_what_pytorch_says() -> None:
    allocator, events = made(capacity_bytes=64 * MiB)
    kept = allocator.malloc(5 * MiB)  # in a segment of 20 MiB, 15 of them unallocated
    allocator.free(allocator.malloc(24 * MiB))
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(50 * MiB + 1)
    error = caught.value
    assert error.requested_bytes == 50 * MiB + 1
    assert error.segment_bytes == 52 * MiB
    assert error.free_bytes == 44 * MiB  # the cached 24 MiB were given back before giving up
    assert error.allocated_bytes == 5 * MiB
    assert error.reserved_unallocated_bytes == 15 * MiB
    assert events[-2:] == [("segment_free", 24 * MiB), ("oom", 50 * MiB + 512)]
    assert memory_stats(allocator)["num_ooms"] == 1
    allocator.free(kept)
    assert allocator.malloc(50 * MiB).size == 50 * MiB  # the allocator goes on after it


def test_a_block_of_just_max_split_size_is_oversize_and_freed_with_others() -> None:
    """release_available_cached_blocks: `while totalReleased < key.size && (*it)->size >= max_split_size`."""
    allocator, events = made("max_split_size_mb:24", capacity_bytes=48 * MiB)
    for block in [allocator.malloc(24 * MiB) for _ in range(2)]:
        allocator.free(block)
    allocator.malloc(40 * MiB)
    assert events[2:] == [("segment_free", 24 * MiB)] * 2 + [("segment_alloc", 40 * MiB)]
    assert memory_stats(allocator)["num_alloc_retries"] == 0  # nothing more had to be given back


def test_a_memory_fraction_is_a_fraction_of_the_whole_device() -> None:
    allocator, _ = made("per_process_memory_fraction:0.5", capacity_bytes=90 * MiB, device_bytes=100 * MiB)
    allocator.malloc(50 * MiB)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(1)
    assert caught.value.free_bytes == 40 * MiB


def test_pytorchs_own_tools_read_the_segments() -> None:
    allocator, _ = made()
    block = allocator.malloc(3 * MiB)
    block.frames = ({"filename": "model.py", "line": 7, "name": "forward"},)
    allocator.malloc(100)
    segments = snapshot_segments(allocator)
    assert segments[0]["blocks"][0]["frames"] == [{"filename": "model.py", "line": 7, "name": "forward"}]
    assert "total_reserved: 22.0MiB" in _memory_viz.segsum({"segments": segments, "device_traces": []})


def test_a_segment_of_a_snapshot_names_its_pool() -> None:
    """`segment_type` of torch.cuda.memory._snapshot(): "small" below a block of 1 MiB, else "large"."""
    allocator, _ = made()
    for size in (1 * MiB, 30 * MiB):
        allocator.malloc(size)
    assert [segment["segment_type"] for segment in snapshot_segments(allocator)] == ["small", "large"]
