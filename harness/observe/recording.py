"""What a StorageTracker saw: the memory history of a CPU run or of a simulation, as allocation spans."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from harness.observe.storage_tracker import Frame as TrackedFrame
from harness.snapshot import BEFORE_RECORDING, AllocationSpan


class Recording:
    """A tracker's sink: a span for every device storage, the bytes live now and at most, and the bytes of
    what was made inside `on_host()`, counted apart.
    """

    def __init__(self, *, clocked: bool = False) -> None:
        self.clocked = clocked
        self.phase = "setup"
        self.module: str | None = None
        """Path of the module that runs, where somebody tells (the simulation does)."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self.spans: list[AllocationSpan] = []
        self.times_us: list[int] = []
        """Of the clock at each event, where `clocked`."""
        self._live: dict[int, AllocationSpan] = {}
        self._last_event = BEFORE_RECORDING
        self._shown: dict[int, tuple[tuple[TrackedFrame, ...], Sequence[dict[str, str | int]]]] = {}
        """Stacks by id, since a tracker gives the same object for the same stack, and kept for its id."""

    def born(
        self, key: int, size_bytes: int, on_host: bool, op: str, frames: tuple[TrackedFrame, ...]
    ) -> None:
        """A storage was made (Sink, observe/storage_tracker.py)."""
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
            frames=() if op == "adopted" else self._frames(frames),  # nobody knows who made it
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
        """A storage was freed (Sink, observe/storage_tracker.py)."""
        if on_host:
            self.host_bytes -= size_bytes
            return
        span = self._live.pop(key)
        self.allocated_bytes -= span.size_bytes
        self.removed(key)
        self._count_event()
        span.died, span.death_phase = self._last_event, self.phase

    def placed(self, key: int, size_bytes: int) -> tuple[int, int]:
        """Address and size of the block that holds a storage. Without an allocator: a number and its bytes.

        simulate/memory.py asks a model of the CUDA allocator instead.
        """
        return key, size_bytes

    def removed(self, key: int) -> None:
        """The storage's block is free."""

    @property
    def last_event(self) -> int:
        """The index of the last event; `born` and `died` count in it."""
        return self._last_event

    def live_spans(self) -> Iterable[AllocationSpan]:
        """What is live now on the device."""
        return self._live.values()

    def restart(self) -> None:
        """Forget what has died; what is live was there before the recording."""
        self._last_event = BEFORE_RECORDING
        self.times_us.clear()
        self.spans = list(self._live.values())
        for span in self.spans:
            span.born = BEFORE_RECORDING

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        self.peak_bytes = self.allocated_bytes

    @contextmanager
    def host_peak(self) -> Iterator[Callable[[], int]]:
        """Inside: a function that says how many bytes more than before were in host memory at most."""
        before, peak = self.host_bytes, self.host_peak_bytes
        self.host_peak_bytes = before
        try:
            yield lambda: self.host_peak_bytes - before
        finally:
            self.host_peak_bytes = max(peak, self.host_peak_bytes)

    def label(self, key: int | None, category: str) -> None:
        """Say what a live storage is. The first label stays; what is on the host needs none."""
        span = self._live.get(key) if key is not None else None
        if span is not None and span.category is None:
            span.category = category

    def own(self, key: int | None, module: str) -> None:
        """Say which module a live storage belongs to."""
        span = self._live.get(key) if key is not None else None
        if span is not None:
            span.module = module


_PLUMBING = re.compile(r"/torch/(_dynamo/eval_frame|_compile|_ops)\.py$|/harness/(simulate|loops)/")
"""Between an operator and a dispatch mode, or in CUDA's place: there only because somebody looks."""


def _shown(stack: tuple[TrackedFrame, ...]) -> Sequence[dict[str, str | int]]:
    return [
        {"filename": code.co_filename, "line": line, "name": code.co_qualname}
        for code, line in stack
        if not _PLUMBING.search(code.co_filename)
    ]
