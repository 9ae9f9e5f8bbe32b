"""The memory history that a StorageTracker records, of a CPU run or of a simulation, as allocation spans."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from harness.observe.storage_tracker import Frame as TrackedFrame
from harness.snapshot import BEFORE_RECORDING, AllocationSpan


class Recording:
    """A tracker's sink: it keeps a span for every storage on the device, the bytes live now and at the peak,
    and separately the bytes of what was made inside `on_host()`.
    """

    def __init__(self, *, clocked: bool = False) -> None:
        self.clocked = clocked
        self.phase = "setup"
        self.module: str | None = None
        """Path of the module that runs, where it is set (by the simulation)."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self.spans: list[AllocationSpan] = []
        self.times_us: list[int] = []
        """The time of each event, in microseconds since 1970, if `clocked`."""
        self._live: dict[int, AllocationSpan] = {}
        self._last_event = BEFORE_RECORDING
        self._shown: dict[int, tuple[tuple[TrackedFrame, ...], Sequence[dict[str, str | int]]]] = {}
        """(the tracker's stack, the frames of its spans) by the stack's id: a tracker gives the same object
        for the same stack, which is kept here so that its id stays its own."""

    def born(
        self,
        key: int,
        size_bytes: int,
        on_host: bool,
        op: str,
        frames: tuple[TrackedFrame, ...],
        element_bytes: int = 0,
    ) -> None:
        """Note that a storage was made (see Sink in observe/storage_tracker.py)."""
        if on_host:
            self.host_bytes += size_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            return
        address, size_bytes = self.placed(key, size_bytes)
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._count_event()
        span = AllocationSpan(
            address,
            size_bytes,
            self._last_event,
            birth_phase=self.phase,
            module=self.module,
            operator=op,
            element_bytes=element_bytes,
            frames=() if op == "adopted" else self._frames(frames),  # an adopted tensor's maker is not known
        )
        self._live[key] = span
        self.spans.append(span)

    def _count_event(self) -> None:
        self._last_event += 1
        if self.clocked:
            self.times_us.append(time.time_ns() // 1000)

    def _frames(self, stack: tuple[TrackedFrame, ...]) -> Sequence[dict[str, str | int]]:
        known = self._shown.get(id(stack))
        if known is None:
            known = self._shown[id(stack)] = (stack, _shown(stack))
        return known[1]

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        """Note that a storage was freed (see Sink in observe/storage_tracker.py)."""
        if on_host:
            self.host_bytes -= size_bytes
            return
        span = self._live.pop(key)
        self.allocated_bytes -= span.size_bytes
        self.removed(key)
        self._count_event()
        span.died, span.death_phase = self._last_event, self.phase

    def placed(self, key: int, size_bytes: int) -> tuple[int, int]:
        """The address and size of the block that holds a storage; without an allocator its key and its bytes.

        simulate/memory.py overrides this with a model of the CUDA allocator.
        """
        return key, size_bytes

    def removed(self, key: int) -> None:
        """Called when the storage's block is free."""

    @property
    def last_event(self) -> int:
        """The index of the last event, as `born` and `died` of the spans count."""
        return self._last_event

    def live_spans(self) -> Iterable[AllocationSpan]:
        """The spans of what is live on the device now."""
        return self._live.values()

    def restart(self) -> None:
        """Begin the recording anew: forget what was freed; what is live was there before the recording."""
        self._last_event = BEFORE_RECORDING
        self.times_us.clear()
        self.spans = list(self._live.values())
        for span in self.spans:
            span.born = BEFORE_RECORDING

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes that are live now."""
        self.peak_bytes = self.allocated_bytes

    @contextmanager
    def host_peak(self) -> Iterator[Callable[[], int]]:
        """Yields a function that gives the most bytes in host memory since then, beyond those from before."""
        before, peak = self.host_bytes, self.host_peak_bytes
        self.host_peak_bytes = before
        try:
            yield lambda: self.host_peak_bytes - before
        finally:
            self.host_peak_bytes = max(peak, self.host_peak_bytes)

    def label(self, key: int | None, category: str) -> None:
        """Give a live storage a category. The first one stays; a storage on the host is passed over."""
        span = self._live.get(key) if key is not None else None
        if span is not None and span.category is None:
            span.category = category

    def own(self, key: int | None, module: str) -> None:
        """Set the module that a live storage belongs to."""
        span = self._live.get(key) if key is not None else None
        if span is not None:
            span.module = module


_PLUMBING = re.compile(r"/torch/(_dynamo/eval_frame|_compile|_ops)\.py$|/harness/(simulate|loops)/")
"""Files whose frames are there only because a run is recorded or simulated, and are left out of stacks."""


def _shown(stack: tuple[TrackedFrame, ...]) -> Sequence[dict[str, str | int]]:
    return [
        {"filename": code.co_filename, "line": line, "name": code.co_qualname}
        for code, line in stack
        if not _PLUMBING.search(code.co_filename)
    ]
