"""The memory of a simulated GPU: storages of shape-only tensors in a model of the CUDA caching allocator."""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.allocator import Allocator, AllocatorOutOfMemory, Block, Settings, snapshot_segments
from harness.formula import DIED, Event, Label, RequestLog, Ruled
from harness.observe import Frame, Recording
from harness.snapshot import (
    BEFORE_RECORDING,
    AllocationSpan,
    TraceEvent,
    build_snapshot,
    categorize,
    label_blocks,
    module_of_its_kind,
    phase_metadata,
)


class SimulatedMemory(Recording):
    """A Recording whose storages are blocks of an Allocator; what it counts are block sizes, as CUDA does."""

    def __init__(
        self, settings: Settings, capacity_bytes: int | None, device_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.allocator = Allocator(settings, capacity_bytes, device_bytes, on_event=self._segment_event)
        self.settings = settings
        self.stream = 0
        """The number of the CUDA stream for which memory is allocated now."""
        self.blocks: dict[int, Block] = {}
        """The block of each live storage and temporary, by key."""
        self._segment_events: list[tuple[int, TraceEvent]] = []
        """What the allocator did with segments in the recording, with the index of the event that follows."""
        self._requested: dict[int, tuple[int, int]] = {}
        """Requested bytes and stream of each allocation in the recording, by the index of its event."""
        self._requested_before: dict[int, tuple[int, int]] = {}
        """Requested bytes and stream, by address, of what was live when the recording began."""
        self.ended = False
        """Whether the simulation is over: frees after it are Python taking the run apart and do not count."""
        self.log = RequestLog()
        """All requests until the end of the recorded step."""
        self._logs = True
        """Whether requests are still logged."""
        self.ruled: dict[int, Ruled] = {}
        """Bytes of storages that are made now by a library's rule, as the log is to have them."""
        self._ran_out_after: int | None = None
        """The event of the recorded step after which a repetition of it ran out of memory; or None."""
        self._retries = 0
        """How often the allocator had given back its cache when the present step began."""
        self._last_temporary = 0
        """The key of the latest temporary. These are negative, since keys of storages count up from 0."""
        self._next_block: Block | None = None
        """The block that the next storage gets, after `ask_again`."""
        self._segments: list[dict[str, Any]] | None = None
        """The segments at the end of the recorded step, once that has been repeated."""

    def placed(self, key: int, size_bytes: int) -> tuple[int, int]:
        """Allocate a block for the storage `key`, and return its address and size. Raises
        AllocatorOutOfMemory, after which nothing changes any more."""
        requested = int(size_bytes)  # the log keeps the rule that a size may come from, and nothing else does
        try:
            block = self.blocks[key] = self._next_block or self.allocator.malloc(requested, self.stream)
            self._next_block = None
        except AllocatorOutOfMemory:
            self.ended = True
            raise
        if self._logs:
            self.log.born(key, self.ruled.get(size_bytes, size_bytes), self.stream)
        self._requested[self._last_event + 1] = requested, self.stream
        return block.address, block.size

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        """Note that a storage was freed (Sink, observe/storage_tracker.py)."""
        if not self.ended:
            super().died(key, size_bytes, on_host)

    def removed(self, key: int) -> None:
        """Give the block back to the allocator's cache."""
        if self._logs:
            self.log.died(key)
        self.allocator.free(self.blocks.pop(key))

    def temporary(self, size_bytes: int, op: str, frames: tuple[Frame, ...]) -> int:
        """Allocate what a kernel needs while it runs. Returns its key, which `release` takes."""
        self._last_temporary -= 1
        self.born(self._last_temporary, size_bytes, False, op, frames)
        return self._last_temporary

    def release(self, keys: Sequence[int]) -> None:
        """Free temporaries in the reverse order, as leaving a C++ scope does."""
        for key in reversed(keys):
            self.died(key, 0, False)

    def keep_workspace(self, size_bytes: int) -> None:
        """Allocate what a library never frees."""
        self.label(self.temporary(size_bytes, "workspace", ()), "other")

    def restart(self) -> None:
        """See Recording.restart."""
        super().restart()
        self._segment_events.clear()
        self._requested.clear()
        self._requested_before = {b.address: (b.requested_size, b.pool.stream) for b in self.blocks.values()}
        self.log.mark("recorded")

    @property
    def peak_reserved_bytes(self) -> int:
        """The peak of the reserved bytes since `reset_peak`."""
        return self.allocator.peak_reserved_bytes

    def reset_peak(self) -> None:
        """Begin a phase: peaks start anew at what is allocated and reserved now."""
        super().reset_peak()
        if self._logs:
            self.log.mark("phase", self.phase)
        reserved = self.allocator.device.reserved_bytes
        reserved.peak = reserved.current

    def end_phase(self) -> None:
        """End the phase: until another begins, no phase's peak counts what is allocated."""
        if self._logs:
            self.log.mark("between")

    def lose(self, keys: Iterable[int]) -> None:
        """Note that those of `keys` that the recorded step allocated are never freed, as in every step."""
        self.log.lost = self.log.born_in_the_step(frozenset(keys))

    def repeat(self, times: int) -> dict[str, tuple[int, int]]:
        """Repeat the recorded step at most `times` times. Returns each phase's allocated and reserved peak.

        Every step makes the same requests, but not with the same free blocks: for some more steps the
        reserved memory can grow, and the allocated memory by what is not split off a block, and by what each
        step leaks. See RequestLog.repeat. Raises AllocatorOutOfMemory. The snapshot stays that of the
        recording.
        """
        self._logs = False
        self._segments = self._segments_now()
        self.allocator.device.emit = lambda *_: None
        try:
            return self.log.repeat(times, self.allocator, self.blocks, self._enter)
        except AllocatorOutOfMemory:
            refused = self.log.refused
            self._ran_out_after = None if refused is None else refused - self.log.start - 1
            self.allocated_bytes = sum(block.size for block in self.blocks.values())
            raise

    def live_spans(self) -> Iterable[AllocationSpan]:
        """What is live now. Where a repeated step ran out of memory, that is what was live at the same moment
        of the recorded step."""
        if self._ran_out_after is None:
            return super().live_spans()
        return [span for span in self.spans if span.live_at(self._ran_out_after)]

    def go_on_recording(self) -> None:
        """After `repeat`, let the snapshot have what follows too, and the segments of its end."""
        self._segments = None
        self.allocator.device.emit = self._segment_event

    def ask_again(self, requests: Sequence[Event]) -> None:
        """Make these requests again, which leave one block: the next storage that is allocated gets it."""
        blocks: dict[int, Block] = {}
        for key, size_bytes, stream in requests:
            if size_bytes == DIED:
                self.allocator.free(blocks.pop(key))
            else:
                blocks[key] = self.allocator.malloc(int(size_bytes), stream)
        (self._next_block,) = blocks.values()

    def labels(self) -> dict[int, Label]:
        """The label of each storage that was live in the recorded step, by key."""
        keys = [*self.log.found(), *(key for key, size, _ in self.log.events[self.log.start :] if size >= 0)]
        return {
            key: Label(
                category, module_of_its_kind(span.module or ""), span.operator or "", span.element_bytes
            )
            for key, span, category in zip(keys, self.spans, categorize(self.spans), strict=True)
        }

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache."""
        if self._logs:
            self.log.mark("emptied")
        self.allocator.empty_cache()

    def begin_step(self) -> None:
        """Begin a step."""
        self._retries = self.allocator.num_alloc_retries
        if self._logs:
            self.log.mark("step")

    def surprises(self) -> list[str]:
        """A warning, if the allocator found no room in the last step or its repetitions, and then found some
        by giving back what it had cached."""
        if self.allocator.num_ooms or self.allocator.num_alloc_retries == self._retries:
            return []
        full = (
            "the device is so full that PyTorch's allocator finds no room in a step, gives back all that it "
            "has cached, for which the device has to stop, and asks again: that is in no estimate of time. "
            "PYTORCH_ALLOC_CONF=expandable_segments:True leaves less in pieces, a smaller batch more room"
        )
        return [full]

    def _enter(self, phase: str) -> None:
        self.phase = phase  # memory may run out in it
        self.reset_peak()

    def _segments_now(self) -> list[dict[str, Any]]:
        """The allocator's segments as a snapshot has them, with stacks."""
        for key, span in self._live.items():
            self.blocks[key].frames = span.frames
        return snapshot_segments(self.allocator)

    def snapshot(self) -> dict[str, Any]:
        """The recorded step as a memory-viz snapshot, with the allocator's segments."""
        segments = self._segments_now() if self._segments is None else self._segments
        label_blocks(segments, self.spans)
        events = self._segment_events + [
            event
            for span, category in zip(self.spans, categorize(self.spans), strict=True)
            for event in self._events_of(span, category)
        ]
        events.sort(key=lambda indexed: indexed[0])
        return build_snapshot([event for _, event in events], segments)

    def _events_of(self, span: AllocationSpan, category: str) -> list[tuple[int, TraceEvent]]:
        """The snapshot's events for one allocation, each with its index."""
        events = []
        there_before = span.born == BEFORE_RECORDING
        requested, stream = (
            self._requested_before[span.address] if there_before else self._requested[span.born]
        )

        def add(index: int, action: Any, phase: str | None) -> None:
            metadata = phase_metadata(phase) if phase else ""
            what = (action, span.address, requested, metadata, span.frames, category, index, stream)
            events.append((index, TraceEvent(*what, module=span.module)))

        if not there_before:
            add(span.born, "alloc", span.birth_phase)
        if span.died is not None:
            add(span.died, "free_requested", span.death_phase)
            add(span.died, "free_completed", span.death_phase)
        return events

    def _segment_event(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        """Note what the allocator did with a segment."""
        following = self._last_event + 1  # the allocation that the segment is made for
        metadata = phase_metadata(self.phase)
        event = TraceEvent(action, address, size_bytes, metadata, time_us=following, stream=stream)  # type: ignore[arg-type]
        self._segment_events.append((following, event))
