"""The allocator model: what must hold after every operation, whatever the settings. MiB = 2**20 bytes."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.allocator import Allocator, AllocatorOutOfMemory, Block, parse_settings
from harness.allocator.memory_stats import memory_stats, snapshot_segments

MiB = 2**20
TEXTS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "expandable_segments:True,max_split_size_mb:20",
    "large_segment_size_mb:12,roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:[1:8,>:2]",
    "per_process_memory_fraction:0.6,garbage_collection_threshold:0.5",
    "per_process_memory_fraction:0.6,garbage_collection_threshold:0.5,max_split_size_mb:32",
    "per_process_memory_fraction:0.6,expandable_segments:True",
)
VERSIONS = ("2.11", "2.12", "2.13")
sizes = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MiB), st.integers(1, 60 * MiB))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), sizes, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def check(allocator: Allocator, live: list[Block], capacity: int) -> None:
    """The invariants; `live` are the blocks given out and not freed."""
    stats = memory_stats(allocator)
    segments = snapshot_segments(allocator)
    blocks = [block for segment in segments for block in segment["blocks"]]
    for segment in segments:
        ends = [block["address"] + block["size"] for block in segment["blocks"]]
        starts = [block["address"] for block in segment["blocks"]]
        assert [segment["address"], *ends] == [*starts, segment["address"] + segment["total_size"]]
    ranges = sorted((segment["address"], segment["total_size"]) for segment in segments)
    assert all(first + size <= then for (first, size), (then, _) in itertools.pairwise(ranges))
    allocated = {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}
    assert allocated == {block.address: block.size for block in live}
    assert sum(allocated.values()) == allocator.allocated_bytes == stats["allocated_bytes.all.current"]
    assert sum(segment["total_size"] for segment in segments) == allocator.reserved_bytes <= capacity
    requested = stats["requested_bytes.all.current"]
    assert requested == sum(block.requested_size for block in live)
    assert requested <= stats["allocated_bytes.all.current"] <= stats["active_bytes.all.current"]
    assert stats["active_bytes.all.current"] <= stats["reserved_bytes.all.current"]
    if not allocator.settings.expandable_segments:
        assert stats["segment.all.current"] == len(segments)
        inactive = [
            block
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "inactive" and len(segment["blocks"]) > 1
        ]
        assert stats["inactive_split.all.current"] == len(inactive)
        assert stats["inactive_split_bytes.all.current"] == sum(block["size"] for block in inactive)
    for name in (
        "allocation",
        "allocated_bytes",
        "requested_bytes",
        "reserved_bytes",
        "inactive_split_bytes",
    ):
        parts = [stats[f"{name}.{pool}_pool.current"] for pool in ("small", "large")]
        assert sum(parts) == stats[f"{name}.all.current"]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEXTS), st.sampled_from(VERSIONS), st.sampled_from([70, 200, 5000]), operations)
def test_invariants(text: str, version: str, megabytes: int, todo: list[tuple[str, int, int]]) -> None:
    capacity = megabytes * MiB
    outcomes = []
    for _ in range(2):  # twice, to see that it is the same
        events: list[tuple[Any, ...]] = []
        allocator = Allocator(
            parse_settings(text, version), capacity, on_event=lambda *event, to=events: to.append(event)
        )
        live: list[Block] = []
        highest: dict[str, int] = {}
        for operation, number, stream in todo:
            if operation == "malloc":
                with contextlib.suppress(AllocatorOutOfMemory):
                    live.append(allocator.malloc(number, stream))
            elif operation == "free" and live:
                allocator.free(live.pop(number % len(live)))
            elif operation == "empty_cache":
                allocator.empty_cache()
            check(allocator, live, capacity)
            for name in ("allocation", "allocated_bytes", "requested_bytes"):
                for part in ("all", "small_pool", "large_pool"):
                    key = f"{name}.{part}"
                    highest[key] = max(highest.get(key, 0), memory_stats(allocator)[f"{key}.current"])
        stats = memory_stats(allocator)
        assert {key: stats[f"{key}.peak"] for key in highest} == highest
        outcomes.append((events, stats, snapshot_segments(allocator)))
        for block in live:
            allocator.free(block)
        allocator.empty_cache()
        assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.device.used_bytes) == (0, 0, 0)
        assert snapshot_segments(allocator) == []
        if not allocator.settings.expandable_segments:
            assert allocator.device.segments == {}
        grown = sum(event[2] for event in events if event[0] in ("segment_alloc", "segment_map"))
        shrunk = sum(event[2] for event in events if event[0] in ("segment_free", "segment_unmap"))
        assert grown == shrunk
    assert outcomes[0] == outcomes[1]
