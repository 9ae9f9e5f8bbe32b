"""The allocator model: cases worked by hand from CUDACachingAllocator.cpp. MiB = 2**20 bytes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.cuda import _memory_viz

from harness.allocator import Allocator, AllocatorOutOfMemory, parse_settings
from harness.allocator.memory_stats import memory_stats, reset_peak_memory_stats, snapshot_segments

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
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (1 * MiB, 1 * MiB, 2 * MiB),
        (1 * MiB + 1, 1 * MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),  # 10 is a multiple of 2: nothing is left over
        # 10 MiB + 512 takes 12 MiB from the device. The rest, 2 MiB - 512, is more than 1 MiB: it is cut off.
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        # 11.5 takes 12. The rest, 0.5, is not more than 1 MiB: the block keeps it.
        (11 * MiB + 512 * KiB, 12 * MiB, 12 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # the rest is exactly 1 MiB: kept
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),
    ],
)
def test_what_one_request_takes(requested: int, block: int, segment: int) -> None:
    allocator, events = made()
    assert allocator.malloc(requested).size == block
    assert events == [("segment_alloc", segment)]
    assert allocator.allocated_bytes == block
    assert allocator.reserved_bytes == segment
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


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator, events = made()
    # Three segments of their own (10 MiB and more), kept apart.
    large, small, middle = (allocator.malloc(size * MiB) for size in (40, 12, 20))
    addresses = [block.address for block in (large, small, middle)]
    for block in (large, small, middle):
        allocator.free(block)
    assert allocator.malloc(14 * MiB).address == addresses[2]  # 20 of {12, 20, 40}
    assert allocator.malloc(6 * MiB).address == addresses[2] + 14 * MiB  # the 6 that are left of it
    assert allocator.malloc(30 * MiB).address == addresses[0]
    assert len(events) == 3


def test_freed_neighbours_join_again() -> None:
    allocator, _ = made()
    parts = [allocator.malloc(256 * KiB) for _ in range(8)]  # fill one small segment
    for index in (1, 3):
        allocator.free(parts[index])
    stats = memory_stats(allocator)
    assert stats["inactive_split.small_pool.current"] == 2
    assert stats["inactive_split_bytes.all.current"] == 512 * KiB
    allocator.free(parts[2])  # joins 1, 2 and 3
    (segment,) = snapshot_segments(allocator)
    assert [block["size"] for block in segment["blocks"]] == [n * 256 * KiB for n in (1, 3, 1, 1, 1, 1)]
    assert memory_stats(allocator)["inactive_split.all.current"] == 1
    for index in (0, 4, 5, 6, 7):
        allocator.free(parts[index])
    stats = memory_stats(allocator)
    assert stats["inactive_split.all.current"] == 0  # the segment is whole: it could be given back
    assert stats["inactive_split_bytes.all.current"] == 0
    # Most was inactive when all but one were free: with one part live at the edge, 7 / 8 of the segment.
    assert stats["inactive_split_bytes.all.peak"] == 7 * 256 * KiB
    assert stats["reserved_bytes.all.current"] == 2 * MiB


@pytest.mark.parametrize(("version", "taken"), [("2.11", 1), ("2.13", 0)])
def test_of_two_equal_blocks_2_11_takes_the_lower_and_2_13_the_older(version: str, taken: int) -> None:
    addresses = iter([0x7F1000000000, 0x7F0000000000])
    allocator = Allocator(parse_settings("", version), new_address=lambda size: next(addresses))
    blocks = [allocator.malloc(20 * MiB) for _ in range(2)]
    places = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(20 * MiB).address == places[taken]


def test_streams_and_pools_share_nothing() -> None:
    allocator, events = made()
    allocator.free(allocator.malloc(20 * MiB, stream=1))
    allocator.malloc(20 * MiB, stream=2)
    allocator.malloc(1000, stream=1)
    allocator.malloc(1000, stream=2)
    assert [size for _, size in events] == [20 * MiB, 20 * MiB, 2 * MiB, 2 * MiB]


def test_a_failed_cudamalloc_frees_what_is_cached_and_tries_again() -> None:
    allocator, events = made(capacity_bytes=40 * MiB)
    allocator.free(allocator.malloc(20 * MiB))
    allocator.malloc(30 * MiB)  # 20 are cached and too small, 20 free: freeing the cached ones makes 40
    assert events == [("segment_alloc", 20 * MiB), ("segment_free", 20 * MiB), ("segment_alloc", 30 * MiB)]
    stats = memory_stats(allocator)
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 0)
    assert stats["reserved_bytes.all.peak"] == 30 * MiB


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


def test_fragments_cannot_be_given_back() -> None:
    allocator, _ = made(capacity_bytes=60 * MiB)
    pairs = [(allocator.malloc(9 * MiB), allocator.malloc(9 * MiB)) for _ in range(3)]
    for first, _ in pairs:
        allocator.free(first)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(12 * MiB)
    # 3 x (20 - 9) MiB lie around in pieces of 9 and 2.
    assert caught.value.reserved_unallocated_bytes == 33 * MiB


def test_max_split_size_keeps_oversize_blocks_whole() -> None:
    allocator, events = made("max_split_size_mb:32")
    allocator.free(allocator.malloc(40 * MiB))
    allocator.malloc(16 * MiB)  # below 32: may not have a block of 32 or more
    allocator.malloc(35 * MiB)  # 40 < 35 + 20: takes it, and does not cut off the 5
    assert events == [("segment_alloc", 40 * MiB), ("segment_alloc", 16 * MiB)]
    assert allocator.allocated_bytes == 56 * MiB
    allocator.malloc(100 * MiB)
    allocator.empty_cache()
    assert memory_stats(allocator)["oversize_segments.current"] == 2
    assert memory_stats(allocator)["oversize_allocations.current"] == 2


def test_an_oversize_block_may_be_at_most_20_mib_too_large() -> None:
    allocator, events = made("max_split_size_mb:32")
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(40 * MiB)  # 60 >= 40 + 20: not taken
    assert events == [("segment_alloc", 60 * MiB), ("segment_alloc", 40 * MiB)]
    wider, events = made("max_split_size_mb:32,max_non_split_rounding_mb:21")
    wider.free(wider.malloc(60 * MiB))
    wider.malloc(40 * MiB)
    assert events == [("segment_alloc", 60 * MiB)]


def test_with_max_split_size_only_as_many_oversize_blocks_are_freed_as_needed() -> None:
    allocator, events = made("max_split_size_mb:20", capacity_bytes=200 * MiB)
    for block in [allocator.malloc(size * MiB) for size in (30, 40, 50, 60)]:
        allocator.free(block)
    allocator.malloc(
        100 * MiB
    )  # 20 free; none of 100: the largest first, 60 + 50 >= 100, then enough is free
    assert events[4:] == [
        ("segment_free", 60 * MiB),
        ("segment_free", 50 * MiB),
        ("segment_alloc", 100 * MiB),
    ]
    assert memory_stats(allocator)["num_alloc_retries"] == 0


def test_a_block_of_just_max_split_size_is_oversize_and_freed_with_others() -> None:
    """release_available_cached_blocks: `while totalReleased < key.size && (*it)->size >= max_split_size`."""
    allocator, events = made("max_split_size_mb:24", capacity_bytes=48 * MiB)
    for block in [allocator.malloc(24 * MiB) for _ in range(2)]:
        allocator.free(block)
    allocator.malloc(40 * MiB)
    assert events[2:] == [("segment_free", 24 * MiB)] * 2 + [("segment_alloc", 40 * MiB)]
    assert memory_stats(allocator)["num_alloc_retries"] == 0  # nothing more had to be given back


def test_garbage_collection_frees_what_went_unused_longest() -> None:
    allocator, events = made(
        "per_process_memory_fraction:0.5,garbage_collection_threshold:0.5", device_bytes=400 * MiB
    )  # collects above 0.5 * 0.5 * 400 = 100 MiB
    old, middle, new = (allocator.malloc(size * MiB) for size in (40, 36, 32))
    for block in (old, middle, new):  # 3 searches so far; ages from now
        allocator.free(block)
    for _ in range(2):
        allocator.free(allocator.malloc(32 * MiB))  # found in the cache: only `new` is used again
    del events[:]
    allocator.malloc(50 * MiB)  # 108 MiB > 100: a search, then ages 3, 3, 1, on average 7/3: the two go
    assert events == [
        ("segment_free", 36 * MiB),
        ("segment_free", 40 * MiB),
        ("segment_alloc", 50 * MiB),
    ]


def test_without_a_memory_fraction_nothing_is_collected() -> None:
    allocator, events = made("garbage_collection_threshold:0.1", capacity_bytes=100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    allocator.free(allocator.malloc(12 * MiB))
    assert [action for action, _ in events] == ["segment_alloc"]
    allocator.malloc(61 * MiB)
    assert ("segment_free", 60 * MiB) in events  # only now, because memory ran out
    assert memory_stats(allocator)["num_alloc_retries"] == 1


def test_a_memory_fraction_is_a_fraction_of_the_whole_device() -> None:
    allocator, _ = made("per_process_memory_fraction:0.5", capacity_bytes=90 * MiB, device_bytes=100 * MiB)
    allocator.malloc(50 * MiB)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(1)
    assert caught.value.free_bytes == 40 * MiB


def test_expandable_segments_grow_by_pages() -> None:
    allocator, events = made("expandable_segments:True", capacity_bytes=1000 * MiB)
    first = allocator.malloc(3 * MiB)
    second = allocator.malloc(30 * MiB)  # behind it: 17 MiB of the first page, and one page more
    small = allocator.malloc(1)
    assert events == [("segment_map", 20 * MiB), ("segment_map", 20 * MiB), ("segment_map", 2 * MiB)]
    assert second.address == first.address + 3 * MiB
    stats = memory_stats(allocator)
    assert stats["segment.all.current"] == 0  # PyTorch counts no segments of this kind
    assert stats["num_device_alloc"] == 3
    allocator.free(first)
    allocator.empty_cache()  # 3 MiB and 7 MiB free, no whole page of 20
    assert allocator.reserved_bytes == 42 * MiB
    allocator.free(second)
    allocator.free(small)
    allocator.empty_cache()
    assert events[3:] == [("segment_unmap", 40 * MiB), ("segment_unmap", 2 * MiB)]
    assert allocator.reserved_bytes == 0
    assert snapshot_segments(allocator) == []


def test_expandable_segments_leave_holes_and_fill_them_first() -> None:
    allocator, events = made("expandable_segments:True", capacity_bytes=100 * MiB)
    blocks = [allocator.malloc(20 * MiB) for _ in range(5)]
    start = blocks[0].address
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(80 * MiB)  # both holes are unmapped, 40 MiB are free then
    assert [segment["address"] - start for segment in snapshot_segments(allocator)] == [0, 40 * MiB, 80 * MiB]
    assert allocator.reserved_bytes == 60 * MiB
    block = allocator.malloc(15 * MiB)
    assert block.address == start + 20 * MiB  # the lowest unmapped page, not the end
    assert events[-1] == ("segment_map", 20 * MiB)


def test_an_expandable_segment_prefers_a_block_that_cannot_grow() -> None:
    allocator, events = made("expandable_segments:True", capacity_bytes=1000 * MiB)
    blocks = [allocator.malloc(size * MiB) for size in (16, 4, 12)]  # 20 + 20 MiB; 8 are free at the end
    allocator.free(blocks[0])
    # 6 MiB fit into 8, but that block can grow to the whole address space: the hole of 16 is smaller.
    assert allocator.malloc(6 * MiB).address == blocks[0].address
    assert len(events) == 2


def test_expandable_pages_mapped_before_memory_ran_out_stay() -> None:
    allocator, events = made("expandable_segments:True", capacity_bytes=50 * MiB)
    allocator.malloc(15 * MiB)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(26 * MiB + 19 * MiB)  # 5 MiB free and 2 pages: 20 + 40 > 50
    assert events == [("segment_map", 20 * MiB), ("oom", 45 * MiB)]
    assert allocator.malloc(25 * MiB).size == 25 * MiB
    assert allocator.reserved_bytes == 40 * MiB


def test_peaks_are_reset_to_what_is_there() -> None:
    allocator, _ = made()
    kept, gone = allocator.malloc(12 * MiB), allocator.malloc(40 * MiB)
    allocator.free(gone)
    assert allocator.peak_allocated_bytes == 52 * MiB
    reset_peak_memory_stats(allocator)
    assert allocator.peak_allocated_bytes == 12 * MiB
    assert allocator.peak_reserved_bytes == 52 * MiB  # still cached
    allocator.empty_cache()
    reset_peak_memory_stats(allocator)
    assert allocator.peak_reserved_bytes == 12 * MiB
    allocator.free(kept)
    stats = memory_stats(allocator)
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 52 * MiB


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
