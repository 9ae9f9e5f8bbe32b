"""The memory of a simulated GPU: storages of shape-only tensors in a model of the CUDA caching allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.allocator import Allocator, AllocatorOutOfMemory, Block, Settings, snapshot_segments
from harness.observe import Frame, Recording
from harness.snapshot import (
    BEFORE_RECORDING,
    AllocationSpan,
    TraceEvent,
    build_snapshot,
    categorize,
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
        self._blocks: dict[int, Block] = {}
        self._segment_events: list[tuple[int, TraceEvent]] = []
        self._requested: dict[int, int] = {}
        """Requested bytes by the event of the birth."""
        self._requested_before: dict[int, int] = {}
        """Requested bytes by address, of what was live when the recording began."""
        self.ended = False
        """The simulation is over: what dies now is Python taking the run apart."""
        self._before: dict[int, int] = {}
        """Requested bytes by key, of what was live when the recording began, in the order of birth."""
        self._done: list[tuple[int, int]] | None = None
        """Since the recording began: key and requested bytes of what was born, key and -1 of what died."""
        self._phases: list[tuple[int, str]] = []
        """Where in `_done` each phase begins."""
        self._segments: list[dict[str, Any]] | None = None
        """At the end of the recorded step, once it has been repeated."""

    def placed(self, key: int, size_bytes: int) -> tuple[int, int]:
        """A block for `size_bytes`. Raises AllocatorOutOfMemory, and then stays as it is."""
        try:
            block = self._blocks[key] = self.allocator.malloc(size_bytes)
        except AllocatorOutOfMemory:
            self.ended = True
            raise
        if self._done is not None:
            self._done.append((key, size_bytes))
        self._requested[self._last_event + 1] = size_bytes
        return block.address, block.size

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        """A storage was freed (Sink, observe/storage_tracker.py)."""
        if not self.ended:
            super().died(key, size_bytes, on_host)

    def removed(self, key: int) -> None:
        """Give the block back to the allocator's cache."""
        if self._done is not None:
            self._done.append((key, -1))
        self.allocator.free(self._blocks.pop(key))

    def temporaries(self, sizes_bytes: Sequence[int], op: str, frames: tuple[Frame, ...]) -> list[int]:
        """Allocate what a kernel needs while it runs. Returns the keys, to be given to `release`."""
        keys = []
        for size_bytes in sizes_bytes:
            self._last_temporary -= 1
            keys.append(self._last_temporary)
            self.born(self._last_temporary, size_bytes, False, op, frames)
        return keys

    _last_temporary = 0
    """Keys of temporaries are negative: storages count up from 0."""

    def release(self, keys: Sequence[int]) -> None:
        """Free temporaries in the reverse order, as leaving a C++ scope does."""
        for key in reversed(keys):
            self.died(key, 0, False)

    def keep_workspace(self, size_bytes: int) -> None:
        """Allocate what a library never gives back."""
        (key,) = self.temporaries([size_bytes], "workspace", ())
        self.label(key, "other")

    def restart(self) -> None:
        """See Recording.restart."""
        super().restart()
        self._segment_events.clear()
        self._requested.clear()
        self._requested_before = {b.address: b.requested_size for b in self._blocks.values()}
        self._before = {key: block.requested_size for key, block in self._blocks.items()}
        self._done = []

    @property
    def peak_reserved_bytes(self) -> int:
        """Reserved bytes at most since `reset_peak`."""
        return self.allocator.peak_reserved_bytes

    def reset_peak(self) -> None:
        """Start new peaks at what is allocated and reserved now. A phase begins so."""
        super().reset_peak()
        if self._done is not None:
            self._phases.append((len(self._done), self.phase))
        reserved = self.allocator.device.reserved_bytes
        reserved.peak = reserved.current

    def repeat(self, times: int) -> dict[str, tuple[int, int]]:
        """Do the recorded step again, at most `times`: allocated and reserved bytes at most, by phase.

        Steps are all alike, but the blocks they leave are not: for a few steps more reserved memory can grow,
        and allocated by what is not split off a block.
        It ends when a step leaves the blocks it found. A step whose leftovers are not those that it found of
        the one before is not repeated. Raises AllocatorOutOfMemory. The snapshot stays that of the recording.
        """
        done, self._done = self._done or [], None
        self._segments = self._segments_now()
        self.allocator.device.emit = lambda *_: None
        born = {key: size for key, size in done if size >= 0}
        died = {key for key, size in done if size < 0}
        left = [key for key in born if key not in died]
        found = [key for key in self._before if key in died]
        peaks: dict[str, tuple[int, int]] = {}
        if [born[key] for key in left] != [self._before[key] for key in found]:
            return peaks
        blocks, state = self._blocks, self._all_blocks()
        for _ in range(times):
            blocks |= {old: blocks.pop(new) for old, new in zip(found, left, strict=True)}
            self._repeat_once(done, blocks, peaks)
            before, state = state, self._all_blocks()
            if state == before:
                break
        return peaks

    def _repeat_once(
        self, done: list[tuple[int, int]], blocks: dict[int, Block], peaks: dict[str, tuple[int, int]]
    ) -> None:
        now = sum(block.size for block in blocks.values())
        ends = [start for start, _ in self._phases[1:]] + [len(done)]
        for (start, phase), end in zip(self._phases, ends, strict=True):
            self.phase = phase  # memory may run out
            self.reset_peak()
            peak = now
            for key, size_bytes in done[start:end]:
                if size_bytes < 0:
                    block = blocks.pop(key)
                    now -= block.size
                    self.allocator.free(block)
                else:
                    block = blocks[key] = self.allocator.malloc(size_bytes)
                    now += block.size
                    peak = max(peak, now)
            allocated, reserved = peaks.get(phase, (0, 0))
            peaks[phase] = max(allocated, peak), max(reserved, self.peak_reserved_bytes)

    def _all_blocks(self) -> list[tuple[int, int, bool]]:
        """(address, size, allocated) of every block: equal states do the same with equal requests."""
        found = []
        for segment in self.allocator.device.segments.values():
            block: Block | None = segment.head
            while block is not None:
                found.append((block.address, block.size, block.allocated))
                block = block.next
        return found

    def _segments_now(self) -> list[dict[str, Any]]:
        for key, span in self._live.items():
            self._blocks[key].frames = span.frames
        return snapshot_segments(self.allocator)

    def snapshot(self) -> dict[str, Any]:
        """The recorded step as a memory-viz snapshot, with the allocator's segments."""
        segments = self._segments_now() if self._segments is None else self._segments
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
        requested = self._requested_before[span.address] if there_before else self._requested[span.born]

        def add(index: int, action: Any, phase: str | None) -> None:
            metadata = phase_metadata(phase) if phase else ""
            events.append(
                (index, TraceEvent(action, span.address, requested, metadata, span.frames, category, index))
            )

        if not there_before:
            add(span.born, "alloc", span.birth_phase)
        if span.died is not None:
            add(span.died, "free_requested", span.death_phase)
            add(span.died, "free_completed", span.death_phase)
        return events

    def _segment_event(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        following = self._last_event + 1  # the allocation that the segment is made for
        metadata = phase_metadata(self.phase)
        event = TraceEvent(action, address, size_bytes, metadata, time_us=following)  # type: ignore[arg-type]
        self._segment_events.append((following, event))
