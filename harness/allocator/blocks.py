"""The parts of the allocator model: blocks, segments, pools of free blocks, statistics. No torch.

Names are those of c10/cuda/CUDACachingAllocator.cpp. All sizes are in bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any


class Block:
    """A range of device memory: allocated, free, or (expandable segments only) unmapped."""

    __slots__ = (
        "address", "allocated", "counter", "frames", "gc_count_base", "key", "mapped", "next", "pool", "prev",
        "requested_size", "segment", "size",
    )  # fmt: skip

    def __init__(self, pool: "StreamPool", segment: "Segment", address: int, size: int, counter: int) -> None:
        self.pool = pool
        self.segment = segment
        self.address = address
        self.size = size
        self.counter = counter
        """A number that decides between equally large free blocks: see Device.number."""
        self.requested_size = 0
        """The requested bytes; for a free block those of its last allocation, as in PyTorch's snapshots."""
        self.allocated = False
        self.mapped = True
        """False for addresses of an expandable segment that have no memory."""
        self.prev: Block | None = None
        self.next: Block | None = None
        """The neighbours by address in the same segment."""
        self.key = self.gc_count_base = 0
        self.frames: Any = ()
        """Whatever the caller attaches to the allocation (a stack); malloc clears it."""


class Segment:
    """The memory of one cudaMalloc, or one expandable range of addresses.

    `head` is its first block, as long as the segment exists.
    """

    __slots__ = ("address", "counter", "head", "page_size", "size", "stream")

    def __init__(self, address: int, size: int, page_size: int, stream: int) -> None:
        self.address = address
        self.size = size
        self.page_size = page_size
        """The size of the pages that are mapped and unmapped; 0 if the segment is not expandable."""
        self.counter = 0
        """A number that decides between equally large free blocks: see Device.number."""
        self.stream = stream
        self.head: Block

    def blocks(self) -> Iterator[Block]:
        """All blocks of the segment, by address."""
        block: Block | None = self.head
        while block is not None:
            yield block
            block = block.next


class Stat:
    """The current, peak and accumulated value of a quantity that changes rarely."""

    __slots__ = ("allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0

    def increase(self, amount: int) -> None:
        """Add to the current value; `allocated` is the sum of all that was ever added."""
        self.current += amount
        self.allocated += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        self.current -= amount


class BlockPool:
    """The small or the large pool: its free blocks by stream, and its statistics.

    Allocations are counted by totals that only grow. The current value is `allocated` less `freed`, and the
    peak is the highest current value seen just before a free. So malloc costs one addition for each quantity.
    """

    __slots__ = (
        "allocated", "allocated_bytes", "freed", "freed_bytes", "get_free_blocks_call_count",
        "inactive_split", "inactive_split_bytes", "inactive_split_bytes_peak", "inactive_split_bytes_total",
        "inactive_split_peak", "inactive_split_total", "is_small", "peak", "peak_bytes",
        "peak_requested_bytes", "requested_bytes", "requested_freed_bytes", "reserved_bytes", "segment",
        "streams",
    )  # fmt: skip

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.streams: dict[int, StreamPool] = {}
        self.get_free_blocks_call_count = 0
        self.allocated = self.freed = self.peak = 0
        self.allocated_bytes = self.freed_bytes = self.peak_bytes = 0
        self.requested_bytes = self.requested_freed_bytes = self.peak_requested_bytes = 0
        self.segment, self.reserved_bytes = Stat(), Stat()
        self.inactive_split = self.inactive_split_total = self.inactive_split_peak = 0
        self.inactive_split_bytes = self.inactive_split_bytes_total = self.inactive_split_bytes_peak = 0

    def free_blocks(self) -> list[Block]:
        """Every free block, by stream, then smallest first."""
        return [block for stream in sorted(self.streams) for block in self.streams[stream].blocks]


class StreamPool:
    """One stream's part of a pool: free blocks, smallest first, and unmapped blocks by address."""

    __slots__ = ("blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        """The keys of `blocks`, in their order, for bisection."""
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def insert_into_blocks(self, block: Block) -> None:
        """List a block as free."""
        block.gc_count_base = self.pool.get_free_blocks_call_count
        # (size, counter, address) as one integer compares faster than as a tuple.
        block.key = key = (block.size << 96) + (block.counter << 64) + block.address
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.blocks.insert(i, block)

    def erase(self, block: Block) -> None:
        """Take a block out of the list of free blocks."""
        i = bisect_left(self.keys, block.key)
        del self.keys[i]
        del self.blocks[i]

    def insert_into_unmapped(self, block: Block) -> None:
        """List a block as unmapped."""
        insort(self.unmapped, block, key=lambda each: each.address)


def merge(low: Block, high: Block, owner: Block) -> Block:
    """Join two neighbours into the lower one, which gets the properties of `owner`, one of the two.

    In PyTorch either object may survive. Here it is always the lower one, so that a segment keeps its first
    block. Neither may be listed as free or unmapped. Returns `low`.
    """
    low.counter = owner.counter
    low.requested_size = owner.requested_size
    low.size += high.size
    low.mapped = owner.mapped
    low.next = after = high.next
    if after is not None:
        after.prev = low
    return low


def split(block: Block, size: int, counter: int) -> Block:
    """Cut a block after `size` bytes. Returns the upper part, a new block with the number `counter`."""
    upper = Block(block.pool, block.segment, block.address + size, block.size - size, counter)
    upper.mapped = block.mapped
    upper.prev = block
    upper.next = after = block.next
    if after is not None:
        after.prev = upper
    block.next = upper
    block.size = size
    return upper
