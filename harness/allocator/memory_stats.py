"""The state and statistics of the allocator model, in the formats of torch.cuda. No torch."""

from itertools import groupby
from typing import Any

from harness.allocator.allocator import Allocator
from harness.allocator.blocks import Block, Stat


def memory_stats(allocator: Allocator) -> dict[str, int]:
    """The dict of torch.cuda.memory_stats for a process without private pools, in bytes and counts.

    `active` equals `allocated` (allocator.py says why). As in PyTorch, expandable segments have no
    `inactive_split`.
    """
    allocator.update_peaks()
    device, small, large = allocator.device, allocator.small_blocks, allocator.large_blocks
    parts = (
        ("all", (small, large), allocator),
        ("small_pool", (small,), small),
        ("large_pool", (large,), large),
    )
    stats: dict[str, int] = {}

    def row(name: str, current: int, peak: int, allocated: int) -> None:
        values = {"current": current, "peak": peak, "allocated": allocated, "freed": allocated - current}
        stats.update({f"{name}.{key}": value for key, value in values.items()})

    for name, total, freed, peak in (
        ("allocation", "allocated", "freed", "peak"),
        ("allocated_bytes", "allocated_bytes", "freed_bytes", "peak_bytes"),
        ("requested_bytes", "requested_bytes", "requested_freed_bytes", "peak_requested_bytes"),
        ("active", "allocated", "freed", "peak"),
        ("active_bytes", "allocated_bytes", "freed_bytes", "peak_bytes"),
    ):
        for part, pools, owner in parts:
            ups, downs = (sum(getattr(pool, field) for pool in pools) for field in (total, freed))
            row(f"{name}.{part}", ups - downs, getattr(owner, peak), ups)
    for name in ("inactive_split", "inactive_split_bytes"):
        for part, pools, owner in parts:
            if allocator.settings.expandable_segments:
                row(f"{name}.{part}", 0, 0, 0)
            else:
                now, ups = (sum(getattr(pool, field) for pool in pools) for field in (name, f"{name}_total"))
                row(f"{name}.{part}", now, getattr(owner, f"{name}_peak"), ups)
    rare: dict[str, Stat] = {
        "oversize_allocations": allocator.oversize_allocations,
        "oversize_segments": device.oversize_segments,
    }
    for part, owner in (("all", device), ("small_pool", small), ("large_pool", large)):
        rare |= {f"segment.{part}": owner.segment, f"reserved_bytes.{part}": owner.reserved_bytes}
    for name, stat in rare.items():
        row(name, stat.current, stat.peak, stat.allocated)
    limit = allocator.settings.max_split_size_bytes
    return stats | {
        "num_alloc_retries": allocator.num_alloc_retries,
        "num_ooms": allocator.num_ooms,
        "num_sync_all_streams": allocator.num_sync_all_streams,
        "num_device_alloc": device.num_device_alloc,
        "num_device_free": device.num_device_free,
        # PyTorch keeps "no limit" as the largest size_t and shows it as a signed integer.
        "max_split_size": -1 if limit is None else limit,
    }


def reset_peak_memory_stats(allocator: Allocator) -> None:
    """Set every peak to the current value, as torch.cuda.reset_peak_memory_stats does."""
    small, large, device = allocator.small_blocks, allocator.large_blocks, allocator.device
    for pool in (small, large):
        pool.peak = pool.peak_bytes = pool.peak_requested_bytes = 0
        pool.inactive_split_peak = pool.inactive_split_bytes_peak = 0
    allocator.peak = allocator.peak_bytes = allocator.peak_requested_bytes = 0
    allocator.inactive_split_peak = allocator.inactive_split_bytes_peak = 0
    allocator.update_peaks()
    for each in (small, large, device):
        each.segment.peak, each.reserved_bytes.peak = each.segment.current, each.reserved_bytes.current
    for stat in (device.oversize_segments, allocator.oversize_allocations):
        stat.peak = stat.current


def snapshot_segments(allocator: Allocator) -> list[dict[str, Any]]:
    """The list torch.cuda.memory._snapshot()["segments"], with the frames that the caller attached to blocks.

    An expandable segment has one entry for each contiguous mapped range.
    """
    segments: list[dict[str, Any]] = []
    for segment in allocator.device.segments.values():
        for mapped, blocks in groupby(segment.blocks(), key=lambda block: block.mapped):
            if mapped:
                segments.append(_segment([*blocks]))
    return sorted(segments, key=lambda segment: segment["address"])


def _segment(blocks: list[Block]) -> dict[str, Any]:
    """The entry of a snapshot for contiguous mapped blocks of one segment."""
    pool, allocated = blocks[0].pool, [block for block in blocks if block.allocated]
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in allocated),
        "active_size": sum(block.size for block in allocated),
        "requested_size": sum(block.requested_size for block in allocated),
        "stream": pool.stream,
        "segment_type": "small" if pool.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": blocks[0].segment.page_size > 0,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_size,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": list(block.frames) if block.allocated else [],
            }
            for block in blocks
        ],
    }
