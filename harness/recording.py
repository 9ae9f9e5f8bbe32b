"""What a StorageTracker saw: the memory history of a CPU run or of a simulation, as allocation spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from harness.attribution import BEFORE_RECORDING, AllocationSpan
from harness.tracker import Frame as TrackedFrame


class Recording:
    """A tracker's sink: bytes live now and at most, on the device and (made inside offload.on_host()) on
    the host; and after `keep()`, a span for every device storage.
    """

    def __init__(self) -> None:
        self.phase = "setup"
        self.module: str | None = None
        """Path of the module that is running, if somebody tells."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self.spans: list[AllocationSpan] = []
        self._live: dict[int, AllocationSpan] = {}
        self._events = BEFORE_RECORDING
        """Index of the last event; stays BEFORE_RECORDING until `keep`."""
        self._kept = False

    def born(
        self, key: int, size_bytes: int, on_host: bool, op: str, frames: tuple[TrackedFrame, ...]
    ) -> None:
        """A storage was made (tracker.Sink)."""
        if on_host:
            self.host_bytes += size_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            return
        address, size_bytes = self.placed(key, size_bytes)
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._events += self._kept
        span = AllocationSpan(
            address,
            size_bytes,
            self._events,
            birth_phase=self.phase,
            module=self.module,
            frames=_frames(frames),
        )
        self._live[key] = span
        if self._kept:
            self.spans.append(span)

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        """A storage was freed (tracker.Sink)."""
        if on_host:
            self.host_bytes -= size_bytes
            return
        span = self._live.pop(key)
        self.allocated_bytes -= span.size_bytes
        self.removed(key)
        if self._kept:
            self._events += 1
            span.died, span.death_phase = self._events, self.phase

    def placed(self, key: int, size_bytes: int) -> tuple[int, int]:
        """Address and size of what a storage takes; without an allocator a number used once, and its bytes."""
        return key, size_bytes

    def removed(self, key: int) -> None:
        """What a storage took is free again."""

    def keep(self) -> None:
        """From now on keep a span for every storage, beginning with those that are live."""
        self._kept = True
        self.spans = list(self._live.values())

    def live_spans(self) -> Iterable[AllocationSpan]:
        """What is live now on the device."""
        return self._live.values()

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        self.peak_bytes = self.allocated_bytes

    def label(self, key: int | None, category: str) -> None:
        """Say what a live storage is. The first label stays; what is on the host needs none."""
        span = self._live.get(key) if key is not None else None
        if span is not None and span.category is None:
            span.category = category


_PLUMBING = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/_ops.py", "harness/simulate.py")
"""Between an operator and a dispatch mode: there only because somebody looks."""


@lru_cache(maxsize=4096)
def _frames(stack: tuple[TrackedFrame, ...]) -> Sequence[dict[str, str | int]]:
    return [
        {"filename": code.co_filename, "line": line, "name": code.co_qualname}
        for code, line in stack
        if not code.co_filename.endswith(_PLUMBING)
    ]
