"""How the allocator model gets memory from the device and gives it back. No torch.

There are two ways, which are never mixed here: a segment for each cudaMalloc, which is given back whole; or
(with expandable_segments) ranges of addresses into which pages are mapped and from which they are unmapped.
Names are those of c10/cuda/CUDACachingAllocator.cpp. All sizes are in bytes.
"""

from collections.abc import Callable

from harness.allocator.addresses import DriverAddresses, kRoundLarge
from harness.allocator.blocks import Block, BlockPool, Segment, Stat, StreamPool, merge, split
from harness.allocator.settings import Settings, kSmallBuffer
from harness.system import nothing

kDefaultDeviceBytes = 2**40
"""The device's memory where it is not given, which decides the address space of an expandable segment."""

EventSink = Callable[[str, int, int, int], None]
"""A function of action, address, size_bytes and stream. The actions segment_alloc,
segment_free, segment_map, segment_unmap and oom (its address is the free bytes) are a recorded trace's."""


class Device:
    """The device's memory as the allocator sees it."""

    def __init__(
        self,
        settings: Settings,
        capacity_bytes: int | None,
        device_bytes: int | None,
        on_event: EventSink | None,
        new_address: Callable[[int], int] | None,
    ) -> None:
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.device_bytes = device_bytes or capacity_bytes or kDefaultDeviceBytes
        self.used_bytes = 0
        """The physical memory that is held: what is reserved, in whole pages of the device."""
        self.most_used_bytes = 0
        """The most that was held at once."""
        self.has_refused = False
        """Whether there ever was too little memory, whatever the allocator then did."""
        self.segments: dict[int, Segment] = {}
        """The segments by address."""
        self.segment, self.reserved_bytes, self.oversize_segments = Stat(), Stat(), Stat()
        self.num_device_alloc = self.num_device_free = 0
        self.emit: EventSink = on_event or nothing
        self.can_take: Callable[[int], bool] | None = None
        """Decides instead of capacity_bytes whether so many bytes are free: a replay's trace shows it."""
        self._addresses = DriverAddresses()
        self._new_address = new_address or self._addresses.take
        self._counter = 0
        """The latest number that a block or a segment got."""

    def free_bytes(self) -> int:
        """The free bytes that cudaMemGetInfo returns."""
        limit = self.device_bytes if self.capacity_bytes is None else self.capacity_bytes
        return limit - self.used_bytes

    def number(self, segment: Segment) -> int:
        """The number of a new block. Of equally large free blocks the one with the lowest is taken."""
        if self.settings.free_block_order == "block_counter":
            self._counter += 1
            return self._counter
        return segment.counter

    def _add_segment(self, pool: StreamPool, size: int, page_size: int) -> Block:
        """A new segment, as its only block."""
        address = self._new_address(size)
        segment = Segment(address, size, page_size, pool.stream)
        if self.settings.free_block_order == "segment_counter":
            self._counter += 1
            segment.counter = self._counter
        block = segment.head = Block(pool, segment, address, size, self.number(segment))
        self.segments[address] = segment
        return block

    def _take(self, size: int) -> bool:
        """Take physical memory from the device, in pages of 2 MiB. False: there is not enough."""
        pages = -(-size // kRoundLarge) * kRoundLarge
        if self.can_take is not None:
            taken = self.can_take(size)
        else:
            taken = self.capacity_bytes is None or self.used_bytes + pages <= self.capacity_bytes
        self.used_bytes += pages * taken
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        self.has_refused = self.has_refused or not taken
        return taken

    def _count(self, pool: BlockPool, size: int) -> None:
        """Count memory that was taken from the device."""
        self.num_device_alloc += 1
        self.reserved_bytes.increase(size)
        pool.reserved_bytes.increase(size)

    def _uncount(self, pool: BlockPool, size: int) -> None:
        """Count memory that was given back to the device."""
        self.used_bytes -= -(-size // kRoundLarge) * kRoundLarge
        self.num_device_free += 1
        self.reserved_bytes.decrease(size)
        pool.reserved_bytes.decrease(size)

    # A cudaMalloc for each segment

    def alloc_block(self, pool: StreamPool, alloc_size: int) -> Block | None:
        """A new segment, as one block that is not listed as free. None: out of memory."""
        if not self._take(alloc_size):
            return None
        block = self._add_segment(pool, alloc_size, page_size=0)
        self._count(pool.pool, alloc_size)
        self.segment.increase(1)
        pool.pool.segment.increase(1)
        if alloc_size >= self.settings.oversize_from_bytes:
            self.oversize_segments.increase(1)
        self.emit("segment_alloc", block.address, alloc_size, pool.stream)
        return block

    def release_block(self, block: Block) -> None:
        """Give back a segment that is one free block."""
        pool, size = block.pool, block.size
        self.emit("segment_free", block.address, size, pool.stream)
        pool.erase(block)
        del self.segments[block.address]
        self._addresses.give_back(block.address, size)
        self._uncount(pool.pool, size)
        self.segment.decrease(1)
        pool.pool.segment.decrease(1)
        if size >= self.settings.oversize_from_bytes:
            self.oversize_segments.decrease(1)

    def release_blocks(self, pool: BlockPool) -> None:
        """Give back every free segment, or every free page, of a pool."""
        for block in pool.free_blocks():
            if block.segment.page_size:
                block = self._unmap_block(block)
                if block.prev is None and block.next is None:
                    block.pool.unmapped.remove(block)
                    del self.segments[block.address]
            elif block.prev is None and block.next is None:
                self.release_block(block)

    # Expandable segments

    def try_allocate_expandable_block(self, pool: StreamPool, size: int) -> Block | None:
        """A block of at least `size` bytes that is not listed as free. None: out of memory.

        Pages that were mapped before memory ran out stay mapped, as free blocks.
        """
        block = self._find_expandable_block(pool, size)
        if not block.mapped and (block := self._map_block(block, min(block.size, size))) is None:
            return None
        while block.size < size:
            assert block.next is not None, "what follows a free block that is too small is unmapped"
            block = self._map_block(block.next, min(size - block.size, block.next.size))
            if block is None:
                return None
        pool.erase(block)
        return block

    def _find_expandable_block(self, pool: StreamPool, size: int) -> Block:
        """The lowest free or unmapped block at which `size` bytes begin that are not allocated. If there is
        none, it is a new segment."""
        for block in pool.unmapped:
            if block.prev is not None and not block.prev.allocated:
                block = block.prev
            room, each = 0, block
            while each is not None and not each.allocated and room < size:
                room += each.size
                each = each.next
            if room >= size:
                return block
        page_size = kSmallBuffer if pool.pool.is_small else self.settings.large_segment_size_bytes
        # Addresses for 9/8 of the device, so that pages can move to the end and leave holes behind.
        pages = -(-(self.device_bytes + self.device_bytes // 8) // page_size)
        block = self._add_segment(pool, pages * page_size, page_size)
        block.mapped = False
        pool.insert_into_unmapped(block)
        return block

    def _map_block(self, block: Block, size: int) -> Block | None:
        """Map whole pages, at least `size` bytes, at the start of an unmapped block.

        Returns the free block that they then belong to. None: out of memory.
        """
        pool = block.pool
        size = -(-size // block.segment.page_size) * block.segment.page_size
        if not self._take(size):
            return None
        self.emit("segment_map", block.address, size, pool.stream)
        pool.unmapped.remove(block)
        if size < block.size:
            pool.insert_into_unmapped(split(block, size, self.number(block.segment)))
        block.mapped = True
        before, after = block.prev, block.next
        if before is not None and not before.allocated and before.mapped:
            pool.erase(before)
            block = merge(before, block, block)
        if after is not None and not after.allocated and after.mapped:
            pool.erase(after)
            merge(block, after, block)
        pool.insert_into_blocks(block)
        self._count(pool.pool, size)
        return block

    def _unmap_block(self, block: Block) -> Block:
        """Unmap the whole pages in a free block. Returns the unmapped block that they then belong to."""
        pool, start, page_size = block.pool, block.segment.address, block.segment.page_size
        begin = -(-(block.address - start) // page_size) * page_size + start
        end = (block.address + block.size - start) // page_size * page_size + start
        if begin >= end:
            return block
        pool.erase(block)
        if begin > block.address:
            # The lower part keeps the object, which may be its segment's head, and gets the new number.
            number, before = self.number(block.segment), block
            block = split(before, begin - before.address, before.counter)
            before.counter = number
            block.requested_size, before.requested_size = before.requested_size, 0
            pool.insert_into_blocks(before)
        if block.size > end - begin:
            pool.insert_into_blocks(split(block, end - begin, self.number(block.segment)))
        block.mapped = False
        before, after = block.prev, block.next
        if before is not None and not before.mapped:
            pool.unmapped.remove(before)
            block = merge(before, block, block)
        if after is not None and not after.mapped:
            pool.unmapped.remove(after)
            merge(block, after, block)
        pool.insert_into_unmapped(block)
        self._uncount(pool.pool, end - begin)
        self.emit("segment_unmap", begin, end - begin, pool.stream)
        return block
