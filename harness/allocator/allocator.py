"""A model of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, 2.11 to 2.15). No torch.

It models one device with any number of streams, without CUDA graphs, private pools and record_stream. So a
free completes at once, and active memory is the same as allocated memory. All sizes are in bytes.
"""

from bisect import bisect_left
from collections.abc import Callable

from harness.allocator.addresses import kRoundLarge
from harness.allocator.blocks import Block, BlockPool, Stat, StreamPool, merge, split
from harness.allocator.device_memory import Device, EventSink
from harness.allocator.settings import Settings, kMinLargeAlloc, kSmallBuffer, kSmallSize

kMinBlockSize = 512
"""The size of every block is a multiple of it."""


class AllocatorOutOfMemory(Exception):
    """Stands for torch.OutOfMemoryError, with its numbers in bytes."""

    def __init__(self, requested: int, segment: int, free: int, allocated: int, reserved: int) -> None:
        super().__init__(
            f"out of memory: {requested} bytes requested, which takes {segment} from the device; "
            f"{free} bytes are free, {reserved - allocated} bytes reserved but unallocated"
        )
        self.numbers = requested, segment, free, allocated, reserved
        """The arguments of the constructor, which make an equal error."""
        self.requested_bytes = requested
        self.segment_bytes = segment
        """The size that was requested of cudaMalloc, which PyTorch's message names."""
        self.free_bytes = free
        """What is free on the device and reserved by nobody."""
        self.allocated_bytes = allocated
        self.reserved_unallocated_bytes = reserved - allocated


class Allocator:
    """Allocates and frees blocks as torch.cuda does.

    capacity_bytes is what cudaMalloc can give: the device's memory less the CUDA context and what other
    processes hold (None: no limit). device_bytes is the device's total memory, of which
    per_process_memory_fraction is a fraction (None: capacity_bytes). on_event is called for every segment
    that comes or goes. new_address gives the address of the next segment from its size (None: as the driver
    does, see addresses.py); up to PyTorch 2.11 addresses decide between equally large free blocks.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        capacity_bytes: int | None = None,
        device_bytes: int | None = None,
        on_event: EventSink | None = None,
        new_address: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        self.device = Device(settings, capacity_bytes, device_bytes, on_event, new_address)
        self.small_blocks, self.large_blocks = BlockPool(is_small=True), BlockPool(is_small=False)
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.oversize_allocations = Stat()
        self.inactive_split_peak = self.inactive_split_bytes_peak = 0
        self.peak = self.peak_bytes = self.peak_requested_bytes = 0
        self._allocated_since_peak = self._split_since_peak = False
        self._expandable = settings.expandable_segments
        self._oversize_from = settings.oversize_from_bytes
        self._max_non_split_rounding = (
            settings.max_non_split_rounding_bytes or settings.large_segment_size_bytes
        )
        self._rounds_to_512 = max(settings.roundup_power2_divisions) <= 1
        self._allowed_memory_maximum: int | None = None
        self._gc_threshold_bytes: int | None = None
        if settings.per_process_memory_fraction < 1:
            allowed = int(settings.per_process_memory_fraction * self.device.device_bytes)
            self._allowed_memory_maximum = allowed
            if settings.garbage_collection_threshold > 0:
                self._gc_threshold_bytes = int(settings.garbage_collection_threshold * allowed)
        self._plain = not (
            self._expandable or settings.max_split_size_bytes or self._gc_threshold_bytes is not None
        )
        self._numbers_blocks = settings.free_block_order == "block_counter"

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocate a block of at least size_bytes for a stream. Raises AllocatorOutOfMemory, after trying all
        that PyTorch tries, and ValueError for 0 bytes: PyTorch requests no block for an empty storage."""
        if size_bytes <= 0:
            raise ValueError(f"malloc of {size_bytes} bytes: an empty storage has no block")
        size = (size_bytes + 511) & ~511 if self._rounds_to_512 else self.round_size(size_bytes)
        block_pool = self.small_blocks if size <= kSmallSize else self.large_blocks
        pool = block_pool.streams.get(stream)
        if pool is None:
            pool = block_pool.streams[stream] = StreamPool(block_pool, stream)
        if self._plain:
            i = bisect_left(pool.keys, size << 96)
            if i < len(pool.keys):
                del pool.keys[i]
                block = pool.blocks.pop(i)
            else:
                block = self._new_block(pool, size, size_bytes)
        else:
            block = self._get_free_block(pool, size) or self._new_block(pool, size, size_bytes)

        was_split = block.next is not None or block.prev is not None
        remaining = block.size - size
        if (
            remaining >= kMinBlockSize
            if block_pool.is_small or self._expandable
            else remaining > kSmallSize and size < self._oversize_from
        ):
            rest = split(block, size, block.counter)
            rest.requested_size = block.requested_size
            if self._numbers_blocks:
                block.counter = self.device.number(block.segment)
            pool.insert_into_blocks(rest)
            if was_split:
                if self._split_since_peak:
                    self._update_inactive_split_peaks()
                block_pool.inactive_split_bytes -= size
            else:
                block_pool.inactive_split += 1
                block_pool.inactive_split_total += 1
                block_pool.inactive_split_bytes += remaining
                block_pool.inactive_split_bytes_total += remaining
                self._split_since_peak = True
        else:
            size = block.size
            if was_split:
                if self._split_since_peak:
                    self._update_inactive_split_peaks()
                block_pool.inactive_split -= 1
                block_pool.inactive_split_bytes -= size
        block.allocated = True
        block.requested_size = size_bytes
        block.frames = ()
        block_pool.allocated += 1
        block_pool.allocated_bytes += size
        block_pool.requested_bytes += size_bytes
        self._allocated_since_peak = True
        if size >= self._oversize_from:
            self.oversize_allocations.increase(1)
        return block

    def free(self, block: Block) -> None:
        """Free an allocated block, which must not be used afterwards. Raises ValueError if it is free."""
        if not block.allocated:
            raise ValueError(f"free of a block that is not allocated, at address {block.address:#x}")
        if self._allocated_since_peak:
            self._update_allocation_peaks()
        pool = block.pool
        block_pool = pool.pool
        size, requested = block.size, block.requested_size
        block.allocated = False
        block_pool.freed += 1
        block_pool.freed_bytes += size
        block_pool.requested_freed_bytes += requested
        if size >= self._oversize_from:
            self.oversize_allocations.decrease(1)

        subsumed_blocks = subsumed_bytes = 0
        before, after = block.prev, block.next
        if before is not None and not before.allocated and before.mapped:
            subsumed_blocks, subsumed_bytes = 1, before.size
            pool.erase(before)
            block = merge(before, block, block)
        if after is not None and not after.allocated and after.mapped:
            subsumed_blocks += 1
            subsumed_bytes += after.size
            pool.erase(after)
            merge(block, after, block)
        pool.insert_into_blocks(block)
        if subsumed_blocks and self._split_since_peak:
            self._update_inactive_split_peaks()
        if block.next is None and block.prev is None:
            block_pool.inactive_split -= subsumed_blocks
            block_pool.inactive_split_bytes -= subsumed_bytes
        else:
            block_pool.inactive_split += 1 - subsumed_blocks
            if not subsumed_blocks:
                block_pool.inactive_split_total += 1
            block_pool.inactive_split_bytes += size
            block_pool.inactive_split_bytes_total += size
            self._split_since_peak = True

    def empty_cache(self) -> None:
        """Give every free segment (with expandable segments: every free page) back to the device."""
        self.num_sync_all_streams += 1
        self.device.release_blocks(self.large_blocks)
        self.device.release_blocks(self.small_blocks)

    @property
    def allocated_bytes(self) -> int:
        """The bytes of torch.cuda.memory_allocated."""
        small, large = self.small_blocks, self.large_blocks
        return small.allocated_bytes + large.allocated_bytes - small.freed_bytes - large.freed_bytes

    @property
    def reserved_bytes(self) -> int:
        """The bytes of torch.cuda.memory_reserved."""
        return self.device.reserved_bytes.current

    @property
    def peak_allocated_bytes(self) -> int:
        """The bytes of torch.cuda.max_memory_allocated."""
        self.update_peaks()
        return self.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The bytes of torch.cuda.max_memory_reserved."""
        return self.device.reserved_bytes.peak

    def round_size(self, size: int) -> int:
        """The smallest size of a block for a request of this size."""
        if size < kMinBlockSize:
            return kMinBlockSize
        power = size.bit_length() - 1
        divisions = self.settings.roundup_power2_divisions[min(max(power - 20, 0), 15)]
        if divisions <= 1 or size <= kMinBlockSize * divisions:
            return (size + 511) & ~511
        step = (1 << power) // divisions
        return -(-size // step) * step

    def get_allocation_size(self, size: int) -> int:
        """The size requested of cudaMalloc for a block of this size, when no cached block fits."""
        if size <= kSmallSize:
            return kSmallBuffer
        if size < kMinLargeAlloc:
            return self.settings.large_segment_size_bytes
        return -(-size // kRoundLarge) * kRoundLarge

    def has_cached(self, size_bytes: int, stream: int = 0) -> bool:
        """Whether malloc would take a free block that is cached, without asking the device for memory."""
        size = self.round_size(size_bytes)
        pool = (self.small_blocks if size <= kSmallSize else self.large_blocks).streams.get(stream)
        return pool is not None and self._best_fit(pool, size) >= 0

    def update_peaks(self) -> None:
        """Update the peaks of what malloc and free count. It must be called before these peaks are read."""
        self._update_allocation_peaks()
        self._update_inactive_split_peaks()

    def _update_allocation_peaks(self) -> None:
        self._allocated_since_peak = False
        small, large = self.small_blocks, self.large_blocks
        small_now, large_now = small.allocated - small.freed, large.allocated - large.freed
        if small_now > small.peak:
            small.peak = small_now
        if large_now > large.peak:
            large.peak = large_now
        if small_now + large_now > self.peak:
            self.peak = small_now + large_now
        small_now = small.allocated_bytes - small.freed_bytes
        large_now = large.allocated_bytes - large.freed_bytes
        if small_now > small.peak_bytes:
            small.peak_bytes = small_now
        if large_now > large.peak_bytes:
            large.peak_bytes = large_now
        if small_now + large_now > self.peak_bytes:
            self.peak_bytes = small_now + large_now
        small_now = small.requested_bytes - small.requested_freed_bytes
        large_now = large.requested_bytes - large.requested_freed_bytes
        if small_now > small.peak_requested_bytes:
            small.peak_requested_bytes = small_now
        if large_now > large.peak_requested_bytes:
            large.peak_requested_bytes = large_now
        if small_now + large_now > self.peak_requested_bytes:
            self.peak_requested_bytes = small_now + large_now

    def _update_inactive_split_peaks(self) -> None:
        self._split_since_peak = False
        small, large = self.small_blocks, self.large_blocks
        small_now, large_now = small.inactive_split, large.inactive_split
        if small_now > small.inactive_split_peak:
            small.inactive_split_peak = small_now
        if large_now > large.inactive_split_peak:
            large.inactive_split_peak = large_now
        if small_now + large_now > self.inactive_split_peak:
            self.inactive_split_peak = small_now + large_now
        small_now, large_now = small.inactive_split_bytes, large.inactive_split_bytes
        if small_now > small.inactive_split_bytes_peak:
            small.inactive_split_bytes_peak = small_now
        if large_now > large.inactive_split_bytes_peak:
            large.inactive_split_bytes_peak = large_now
        if small_now + large_now > self.inactive_split_bytes_peak:
            self.inactive_split_bytes_peak = small_now + large_now

    def _new_block(self, pool: StreamPool, size: int, requested: int) -> Block:
        """A block of memory from the device. On failure cached memory is given back, first a little, then
        all, and the request is made again."""
        if self._gc_threshold_bytes is not None:
            self._garbage_collect_cached_blocks(self._gc_threshold_bytes)
        block = self._alloc_block(pool, size)
        if block is None and self._release_available_cached_blocks(pool, size):
            block = self._alloc_block(pool, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._alloc_block(pool, size)
        if block is None:
            self.num_ooms += 1
            free = self.device.free_bytes()
            self.device.emit("oom", free, size, pool.stream)
            raise AllocatorOutOfMemory(
                requested, self.get_allocation_size(size), free, self.allocated_bytes, self.reserved_bytes
            )
        return block

    def _alloc_block(self, pool: StreamPool, size: int) -> Block | None:
        """A block of memory from the device. None: out of memory, or beyond what the process may use."""
        alloc_size = self.get_allocation_size(size)
        limit = self._allowed_memory_maximum
        if limit is not None and self.reserved_bytes + alloc_size > limit:
            return None
        if self._expandable:
            return self.device.try_allocate_expandable_block(pool, size)
        return self.device.alloc_block(pool, alloc_size)

    def _get_free_block(self, pool: StreamPool, size: int) -> Block | None:
        """Take the cached block that fits best out of the list of free blocks. None: no block fits."""
        if self._gc_threshold_bytes is not None:
            pool.pool.get_free_blocks_call_count += 1
        i = self._best_fit(pool, size)
        if i < 0:
            return None
        del pool.keys[i]
        return pool.blocks.pop(i)

    def _best_fit(self, pool: StreamPool, size: int) -> int:
        """The index of the smallest free block that fits. -1: there is none, or it is oversize."""
        blocks = pool.blocks
        i = bisect_left(pool.keys, size << 96)
        if i == len(blocks):
            return -1
        if self._expandable:
            # A block before unmapped addresses counts as large as it can grow: look on for a smaller one.
            while i + 1 < len(blocks) and _expandable_size(blocks[i + 1]) < _expandable_size(blocks[i]):
                i += 1
        if size < self._oversize_from:
            return -1 if blocks[i].size >= self._oversize_from else i
        return -1 if blocks[i].size >= size + self._max_non_split_rounding else i

    def _release_available_cached_blocks(self, pool: StreamPool, size: int) -> bool:
        """With max_split_size: give back one oversize block that is large enough, or several that together
        are. Returns whether that was possible."""
        if self.settings.max_split_size_bytes is None or self._expandable:
            return False
        needed = max(size, self._oversize_from)
        i = bisect_left(pool.keys, needed << 96)
        if i < len(pool.blocks):
            self.device.release_block(pool.blocks[i])
            return True
        released = 0
        for block in reversed(pool.blocks[:]):
            if released >= needed or block.size < self._oversize_from:
                break
            released += block.size
            self.device.release_block(block)
        return released >= needed

    def _garbage_collect_cached_blocks(self, threshold_bytes: int) -> None:
        """Beyond the threshold, give back large segments that were unused for at least the average time."""
        target = self.reserved_bytes - threshold_bytes
        if target <= 0 or self._expandable:
            return
        pool = self.large_blocks
        ages = {
            block: pool.get_free_blocks_call_count - block.gc_count_base
            for block in pool.free_blocks()
            if block.prev is None and block.next is None
        }
        total_age, reclaimed, freed_one = sum(ages.values()), 0, True
        while reclaimed < target and freed_one and ages:
            average_age = total_age / len(ages)
            freed_one = False
            for block in [block for block in ages if ages[block] >= average_age]:
                freed_one = True
                reclaimed += block.size
                total_age -= ages.pop(block)
                self.device.release_block(block)


def _expandable_size(block: Block) -> int:
    """The size that a free block can grow to by mapping the addresses behind it."""
    after = block.next
    return block.size if after is None or after.mapped else block.size + after.size
