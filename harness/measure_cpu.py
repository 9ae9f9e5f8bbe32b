"""Measuring a run on the CPU: phase times from the clock, memory as the bytes of live tensors.

There is no allocator to ask on the CPU, so "allocated" here is what a StorageTracker counts, labelled
`live_tensors`. The tracker costs time, so it is off while a step is timed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harness.attribution import AllocationSpan
from harness.loop import Kind
from harness.recording import Recording
from harness.snapshot import snapshot_of_storages
from harness.step import Training
from harness.step_profile import HardwareSummary, MemoryStats, PhaseStats
from harness.tensors import labelled_tensors, watch_gradients
from harness.tracker import StorageTracker


class CpuObserver:
    """Times every phase; follows storages in setup, the first warmup step and the recorded steps."""

    memory_kind = "live_tensors"

    def __init__(self) -> None:
        self.times_s: list[dict[str, float]] = []
        self.kinds: list[Kind] = []
        self._recording = Recording()
        self._tracker = StorageTracker(self._recording, frames=True)
        self._training: Training | None = None
        self._phases: dict[str, PhaseStats] = {}
        self._setup_peak_bytes: int | None = None
        self._first_step_peak_bytes: int | None = None
        self._started = 0.0

    def trained(self, training: Training) -> None:
        """Called once after setup with what was built."""
        self._training = training

    def begin_step(self, index: int, kind: Kind) -> None:
        """See loop.LoopObserver."""
        if kind == "recorded" and "recorded" not in self.kinds:
            self._adopt()
            self._recording.keep()
        self.kinds.append(kind)
        self.times_s.append(defaultdict(float))
        self._started = time.perf_counter()

    def end_step(self) -> None:
        """The step is done: on the CPU nothing is queued."""
        self.times_s[-1]["step"] = time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See step.Observer."""
        self._recording.phase = name
        if not self._tracks():
            start = time.perf_counter()
            yield
            self.times_s[-1][name] += time.perf_counter() - start
            return
        self._recording.reset_peak()
        with self._tracker, self._labelled_gradients(name):
            yield
        self._note_peak(name)

    def phase_memory(self) -> dict[str, PhaseStats]:
        """Peaks and final bytes of the recorded steps' phases."""
        return self._phases

    def memory(self) -> MemoryStats:
        """The peaks that are known without the spans."""
        return MemoryStats(
            kind="live_tensors",
            host_bytes=self._recording.host_peak_bytes or None,
            setup_peak_allocated_bytes=self._setup_peak_bytes,
            first_step_peak_allocated_bytes=self._first_step_peak_bytes,
        )

    def spans(self) -> list[AllocationSpan]:
        """Every device storage of the recorded steps, with its category where the owner is known."""
        return self._recording.spans

    def snapshot(self) -> dict[str, Any]:
        """The recorded steps as a memory-viz snapshot."""
        return snapshot_of_storages(self._recording.spans)

    def hardware(self) -> HardwareSummary:
        """The CPU, by name and memory."""
        import psutil

        return HardwareSummary(name=_cpu_name(), kind="cpu", memory_bytes=psutil.virtual_memory().total)

    def facts(self) -> dict[str, Any]:
        """Nothing more than the profile's own fields."""
        return {}

    def utilization(self) -> float | None:
        """NVML knows GPUs only."""
        return None

    def _tracks(self) -> bool:
        if not self.kinds or self.kinds[-1] == "recorded":
            return True
        return self.kinds == ["warmup"]

    @contextmanager
    def _labelled_gradients(self, name: str) -> Iterator[None]:
        if self._training is None or name != "backward":
            yield
            return
        stop = watch_gradients(self._training.model, self._label_gradient)
        try:
            yield
        finally:
            stop()

    def _label_gradient(self, gradient: Tensor) -> None:
        self._recording.label(self._tracker.key_of(gradient), "gradients")

    def _note_peak(self, name: str) -> None:
        peak, end = self._recording.peak_bytes, self._recording.allocated_bytes
        if not self.kinds:
            self._setup_peak_bytes = peak
        elif self.kinds[-1] == "recorded":
            stats = self._phases.setdefault(name, PhaseStats())
            stats.peak_allocated_bytes = max(stats.peak_allocated_bytes or 0, peak)
            stats.allocated_at_end_bytes = end
        else:
            self._first_step_peak_bytes = max(self._first_step_peak_bytes or 0, peak)

    def _adopt(self) -> None:
        """Find what untracked steps made and kept, and say what everything that stays is."""
        assert self._training is not None
        for category, tensor in labelled_tensors(self._training):
            self._recording.label(self._tracker.adopt(tensor), category)


def _cpu_name() -> str:
    import platform

    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
