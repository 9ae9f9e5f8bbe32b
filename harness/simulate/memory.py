"""The memory of a simulated GPU: storages of shape-only tensors in a model of the CUDA caching allocator."""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.allocator import Allocator, AllocatorOutOfMemory, Block, Settings, snapshot_segments
from harness.formula import DIED, Event, Label, RequestLog
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
        """The stream that memory is allocated for now: the allocator keeps each one's apart."""
        self._blocks: dict[int, Block] = {}
        self._segment_events: list[tuple[int, TraceEvent]] = []
        self._requested: dict[int, tuple[int, int]] = {}
        """Requested bytes and stream by the event of the birth."""
        self._requested_before: dict[int, tuple[int, int]] = {}
        """Requested bytes and stream by address, of what was live when the recording began."""
        self.ended = False
        """The simulation is over: what dies now is Python taking the run apart."""
        self.log = RequestLog()
        """Of everything until the recorded step is over."""
        self._logs = True
        self._ran_out_after: int | None = None
        """The event of the recorded step after which a step like it ran out of memory."""
        self._last_temporary = 0
        """Keys of temporaries are negative: storages count up from 0."""
        self._left: Block | None = None
        """See `ask_again`."""
        self._segments: list[dict[str, Any]] | None = None
        """At the end of the recorded step, once it has been repeated."""

    def placed(self, key: int, size_bytes: int) -> tuple[int, int]:
        """A block for `size_bytes`. Raises AllocatorOutOfMemory, and then stays as it is."""
        requested = int(size_bytes)  # the log keeps the rule that a size may come from, and nothing else does
        try:
            block = self._blocks[key] = self._left or self.allocator.malloc(requested, self.stream)
            self._left = None
        except AllocatorOutOfMemory:
            self.ended = True
            raise
        if self._logs:
            self.log.born(key, size_bytes, self.stream)
        self._requested[self._last_event + 1] = requested, self.stream
        return block.address, block.size

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        """A storage was freed (Sink, observe/storage_tracker.py)."""
        if not self.ended:
            super().died(key, size_bytes, on_host)

    def removed(self, key: int) -> None:
        """Give the block back to the allocator's cache."""
        if self._logs:
            self.log.died(key)
        self.allocator.free(self._blocks.pop(key))

    def temporary(self, size_bytes: int, op: str, frames: tuple[Frame, ...]) -> int:
        """Allocate what a kernel needs while it runs. Returns the key, to be given to `release`."""
        self._last_temporary -= 1
        self.born(self._last_temporary, size_bytes, False, op, frames)
        return self._last_temporary

    def release(self, keys: Sequence[int]) -> None:
        """Free temporaries in the reverse order, as leaving a C++ scope does."""
        for key in reversed(keys):
            self.died(key, 0, False)

    def keep_workspace(self, size_bytes: int) -> None:
        """Allocate what a library never gives back."""
        self.label(self.temporary(size_bytes, "workspace", ()), "other")

    def restart(self) -> None:
        """See Recording.restart."""
        super().restart()
        self._segment_events.clear()
        self._requested.clear()
        self._requested_before = {b.address: (b.requested_size, b.pool.stream) for b in self._blocks.values()}
        self.log.mark("recorded")

    @property
    def peak_reserved_bytes(self) -> int:
        """Reserved bytes at most since `reset_peak`."""
        return self.allocator.peak_reserved_bytes

    def reset_peak(self) -> None:
        """Start new peaks at what is allocated and reserved now. A phase begins so."""
        super().reset_peak()
        if self._logs:
            self.log.mark("phase", self.phase)
        reserved = self.allocator.device.reserved_bytes
        reserved.peak = reserved.current

    def end_phase(self) -> None:
        """What comes until the next one begins is of no phase's peaks."""
        if self._logs:
            self.log.mark("between")

    def lose(self, keys: Iterable[int]) -> None:
        """What of `keys` the recorded step made, nobody frees: each step like it loses as much again."""
        self.log.lost = self.log.born_in_the_step(frozenset(keys))

    def repeat(self, times: int) -> dict[str, tuple[int, int]]:
        """Do the recorded step again, at most `times`: allocated and reserved bytes at most, by phase.

        Steps are all alike, but the blocks they leave are not: for a few steps more reserved memory can grow,
        and allocated by what is not split off a block, and by what each of them loses.
        See RequestLog.repeat. Raises AllocatorOutOfMemory. The snapshot stays that of the recording.
        """
        self._logs = False
        self._segments = self._segments_now()
        self.allocator.device.emit = lambda *_: None
        try:
            return self.log.repeat(times, self.allocator, self._blocks, self._enter)
        except AllocatorOutOfMemory:
            refused = self.log.refused
            self._ran_out_after = None if refused is None else refused - self.log.start - 1
            self.allocated_bytes = sum(block.size for block in self._blocks.values())
            raise

    def live_spans(self) -> Iterable[AllocationSpan]:
        """What is live now; where a repeated step ran out, what was at that moment of the recorded one."""
        if self._ran_out_after is None:
            return super().live_spans()
        return [span for span in self.spans if span.live_at(self._ran_out_after)]

    def go_on_recording(self) -> None:
        """After `repeat`: what comes now belongs to the snapshot too, segments as they are at its end."""
        self._segments = None
        self.allocator.device.emit = self._segment_event

    def ask_again(self, requests: Sequence[Event]) -> None:
        """Make requests once more that leave one storage: the next one that is made has its block."""
        blocks: dict[int, Block] = {}
        for key, size_bytes, stream in requests:
            if size_bytes == DIED:
                self.allocator.free(blocks.pop(key))
            else:
                blocks[key] = self.allocator.malloc(int(size_bytes), stream)
        (self._left,) = blocks.values()

    def labels(self) -> dict[int, Label]:
        """By key, what each storage of the recorded step is, with what was there before."""
        keys = [*self.log.found(), *(key for key, size, _ in self.log.events[self.log.start :] if size >= 0)]
        return {
            key: Label(category, module_of_its_kind(span.module or ""), span.operator or "")
            for key, span, category in zip(keys, self.spans, categorize(self.spans), strict=True)
        }

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache."""
        if self._logs:
            self.log.mark("emptied")
        self.allocator.empty_cache()

    def begin_step(self) -> None:
        """What comes is of the next step."""
        if self._logs:
            self.log.mark("step")

    def _enter(self, phase: str) -> None:
        self.phase = phase  # memory may run out in it
        self.reset_peak()

    def _segments_now(self) -> list[dict[str, Any]]:
        for key, span in self._live.items():
            self._blocks[key].frames = span.frames
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
        following = self._last_event + 1  # the allocation that the segment is made for
        metadata = phase_metadata(self.phase)
        event = TraceEvent(action, address, size_bytes, metadata, time_us=following, stream=stream)  # type: ignore[arg-type]
        self._segment_events.append((following, event))
