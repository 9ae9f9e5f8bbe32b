"""Replay the allocations of a recorded CUDA trace through the allocator model and compare.

The requests are taken from the trace, and so is what the model cannot know: at which addresses the driver
puts new segments, and when it has no more memory. Everything else must follow: which block each request gets,
and which segments are allocated, freed, mapped and unmapped, in which order.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.allocator.allocator import Allocator, AllocatorOutOfMemory
from harness.allocator.blocks import Block, Segment
from harness.allocator.device_memory import Device
from harness.allocator.settings import Settings

SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
NEUTRAL_ACTIONS = ("free_requested", "snapshot", "annotate")

_UNPLACED = 2**63
"""Above every address that a device has, and below what a block's rank has room for."""

Event = tuple[str, int, int, int]
"""Action, address, size in bytes, stream."""


@dataclass(frozen=True)
class Divergence:
    """The first place where the model does something else than the trace."""

    index: int
    """Of the trace entry whose request diverged."""
    problem: str
    before: list[Event]
    """The trace entries up to that one, the last ten."""


@dataclass(frozen=True)
class Replay:
    """The model after the replay, and where it diverged, if it did."""

    allocator: Allocator
    divergence: Divergence | None
    requests: int
    """Mallocs and frees replayed."""


class _Diverged(Exception):
    pass


class _Trace:
    """The segment events that the trace has between two requests; the model has to make the same."""

    def __init__(self, settings: Settings, device_bytes: int | None) -> None:
        self.due: deque[Event] = deque()
        self.allocator = Allocator(settings, None, device_bytes, self.check, self.new_address)
        self.allocator.device.can_take = self.can_take
        self._unplaced = _UNPLACED

    def check(self, action: str, address: int, size: int, stream: int) -> None:
        """Compare what the model does with what the trace has next."""
        there = self.due[0] if self.due else None
        if action == "oom":
            if not there or (there[0], *there[2:]) != ("oom", size, stream):
                raise _Diverged(
                    f"the model needs new memory for {size} bytes, the trace has {there or 'none'}"
                )
            address = there[1]  # the device's free bytes: only the driver knows them
        elif there and action == "segment_map" and address >= _UNPLACED:
            _move(self.allocator.device, self.allocator.device.segments[address], there[1])
            address = there[1]
        if there != (action, address, size, stream):
            made = (action, address, size, stream)
            raise _Diverged(f"the model does {made}, the trace has {there or 'nothing'}")
        self.due.popleft()

    def new_address(self, size: int) -> int:
        """Where the driver put a new segment; from _UNPLACED on: not known until something is mapped."""
        if self.due and self.due[0][0] == "segment_alloc":
            return self.due[0][1]
        self._unplaced += size
        return self._unplaced

    def can_take(self, size: int) -> bool:
        return bool(self.due) and self.due[0][0] in ("segment_alloc", "segment_map")


def replay(
    entries: Iterable[Mapping[str, Any]], settings: Settings, device_bytes: int | None = None
) -> Replay:
    """Replay torch.cuda.memory._snapshot()["device_traces"][0], recorded from the process's first allocation.

    settings must be those of the recording, its PyTorch version's free_block_order included. device_bytes,
    the device's total memory, matters with per_process_memory_fraction and when expandable segments fill up.
    A trace does not tell a failed cudaMalloc from an empty_cache(): num_alloc_retries means nothing here.
    """
    trace, blocks, recent = _Trace(settings, device_bytes), dict[int, Block](), deque[Event](maxlen=10)
    requests, index = 0, -1
    try:
        for entry in entries:
            index += 1
            # of "oom" torch writes no address but the device's free bytes (memory_snapshot.cpp)
            place = entry["device_free" if entry["action"] == "oom" else "addr"]
            recent.append((entry["action"], place, entry["size"], entry.get("stream", 0)))
            requests += _follow(trace, blocks, recent[-1])
        _empty_cache_if_due(trace)
    except _Diverged as diverged:
        return Replay(trace.allocator, Divergence(index, str(diverged), list(recent)), requests)
    return Replay(trace.allocator, None, requests)


def _follow(trace: _Trace, blocks: dict[int, Block], event: Event) -> int:
    """Do what one trace entry says. Returns the number of requests made."""
    action, address, size, stream = event
    allocator = trace.allocator
    if action in SEGMENT_ACTIONS:
        trace.due.append(event)
    elif action == "alloc":
        _empty_cache_if_due(trace, size, stream)
        block = allocator.malloc(size, stream)
        if trace.due or block.address != address:
            rest = f", and the trace also has {list(trace.due)}" if trace.due else ""
            raise _Diverged(f"the model allocates at {block.address}, the trace at {address}{rest}")
        blocks[address] = block
    elif action == "free_completed":
        _empty_cache_if_due(trace)
        if address not in blocks:
            raise _Diverged(f"{address} was allocated before the recording began: record from the start")
        allocator.free(blocks.pop(address))
    elif action == "oom":
        trace.due.append(event)
        _empty_cache_if_due(trace, size, stream)
        try:
            allocator.malloc(size, stream)
        except AllocatorOutOfMemory:
            return 1
        raise _Diverged("the trace is out of memory, the model is not")
    elif action in NEUTRAL_ACTIONS:
        return 0
    else:
        raise _Diverged(f"unknown action {action!r}")
    return int(action not in SEGMENT_ACTIONS)


def _move(device: Device, segment: Segment, address: int) -> None:
    """Change the address of a segment that is one unmapped block. A replay learns it at its first use."""
    block = segment.head
    block.pool.unmapped.remove(block)
    del device.segments[segment.address]
    segment.address = block.address = address
    device.segments[address] = segment
    block.pool.insert_into_unmapped(block)


def _empty_cache_if_due(trace: _Trace, size: int = 0, stream: int = 0) -> None:
    """Segments freed before a free, or before a request that has a cached block: that was an empty_cache().

    Before other requests a failed cudaMalloc frees the same and leads to the same state. Only with
    max_split_size or garbage collection it may free less; an empty_cache() there looks like a divergence.
    """
    freed = bool(trace.due) and trace.due[0][0] in ("segment_free", "segment_unmap")
    if freed and (not size or trace.allocator.has_cached(size, stream)):
        trace.allocator.empty_cache()
