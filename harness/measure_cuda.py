"""Measuring a run on a GPU: CUDA events, the caching allocator's own statistics and history, NVML.

While a step is timed nothing is done but to record two events a phase. Peaks are read in the other steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.attribution import AllocationSpan
from harness.cuda_trace import Label, phase_metadata, spans_from_trace
from harness.loop import Kind
from harness.nvml import Nvml
from harness.snapshot import label_snapshot
from harness.step import Training
from harness.step_profile import HardwareSummary, MemoryStats, PhaseStats
from harness.tensors import labelled_tensors, storage_of, watch_gradients

MAX_ENTRIES = 2_000_000
"""Bound of the recorded history; a step of a 70B model has about 100,000 entries."""


class CudaObserver:
    """Events around every phase; statistics and history outside the timed steps."""

    memory_kind = "cuda_allocator"

    def __init__(self, device: torch.device, *, snapshot: bool) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self.times_s: list[dict[str, float]] = []
        self.kinds: list[Kind] = []
        self._nvml = Nvml(str(torch.cuda.get_device_properties(self.device).uuid))
        self._history = snapshot
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._labels: list[Label] = []
        self._training: Training | None = None
        self._phases: dict[str, PhaseStats] = {}
        self._setup_peak_bytes: int | None = None
        self._first_step_peak_bytes: int | None = None
        self._reserved_at_peak: tuple[int, int] = (0, 0)
        torch.cuda.set_device(self.device)
        self._record_history(True)

    def trained(self, training: Training) -> None:
        """Called once after setup with what was built."""
        self._training = training

    def begin_step(self, index: int, kind: Kind) -> None:
        """See loop.LoopObserver."""
        before = self.kinds[-1] if self.kinds else "warmup"
        if kind != before:
            self._record_history(kind == "recorded")
            if kind == "timed":
                self._nvml.start()
        if kind == "recorded":
            self._label_what_stays()
        self.kinds.append(kind)
        self.times_s.append(defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See step.Observer."""
        if self.kinds and self.kinds[-1] == "timed":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.memory._set_memory_metadata(phase_metadata(name, len(self.kinds) - 1))
        with self._labelled_gradients(name):
            yield
        torch.cuda.memory._set_memory_metadata("")
        self._note_peak(name)

    def end_step(self) -> None:
        """Wait for the step and read its times: the one synchronization of a step."""
        torch.cuda.synchronize(self.device)
        for name, start, end in self._events:
            self.times_s[-1][name] += start.elapsed_time(end) / 1e3
        if self._events:
            self.times_s[-1]["step"] = self._events[0][1].elapsed_time(self._events[-1][2]) / 1e3
        self._events.clear()

    def phase_memory(self) -> dict[str, PhaseStats]:
        """Peaks and final bytes of the recorded steps' phases, from reset statistics."""
        return self._phases

    def memory(self) -> MemoryStats:
        """The allocator's and the driver's numbers."""
        reserved, allocated = self._reserved_at_peak
        process_bytes = self._nvml.process_bytes()
        now_reserved = torch.cuda.memory_reserved(self.device)
        return MemoryStats(
            kind="cuda_allocator",
            peak_reserved_bytes=reserved or None,
            process_bytes=process_bytes,
            fragmentation_bytes=reserved - allocated if reserved else None,
            cuda_context_bytes=None if process_bytes is None else process_bytes - now_reserved,
            setup_peak_allocated_bytes=self._setup_peak_bytes,
            first_step_peak_allocated_bytes=self._first_step_peak_bytes,
        )

    def spans(self) -> list[AllocationSpan]:
        """Every allocation of the recorded steps; empty without history."""
        if not self._history:
            return []
        snapshot = torch.cuda.memory._snapshot(self.device)
        return self._spans_of(snapshot)

    def snapshot(self) -> dict[str, Any]:
        """The allocator's state and recorded history, with categories written into the trace."""
        snapshot: Any = torch.cuda.memory._snapshot(self.device)
        label_snapshot(snapshot, self._spans_of(snapshot), self._index())
        return snapshot

    def hardware(self) -> HardwareSummary:
        """The GPU by the name and the memory its driver gives, with the datasheet's ceilings if known."""
        properties = torch.cuda.get_device_properties(self.device)
        return HardwareSummary(name=properties.name, kind="cuda", memory_bytes=properties.total_memory)

    def facts(self) -> dict[str, Any]:
        """What belongs into the provenance of a GPU measurement."""
        capability = torch.cuda.get_device_capability(self.device)
        return {
            "driver": self._nvml.driver(),
            "cuda": torch.version.cuda,
            "compute_capability": f"{capability[0]}.{capability[1]}",
            "device_used_bytes": self._nvml.used_bytes(),
            "num_alloc_retries": torch.cuda.memory_stats(self.device)["num_alloc_retries"],
        }

    def utilization(self) -> float | None:
        """Mean busy fraction over the timed steps."""
        return self._nvml.utilization()

    def _index(self) -> int:
        assert self.device.index is not None
        return self.device.index

    def _spans_of(self, snapshot: Any) -> list[AllocationSpan]:
        segments = [s for s in snapshot["segments"] if s["device"] == self._index()]
        return spans_from_trace(snapshot["device_traces"][self._index()], self._labels, segments)

    def _record_history(self, on: bool) -> None:
        if not self._history:
            return
        if on:
            # "python": the default symbolizes C++ frames too, which takes minutes
            torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python", context="all")
        else:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _note_peak(self, name: str) -> None:
        stats = torch.cuda.memory_stats(self.device)
        peak, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        if not self.kinds:
            self._setup_peak_bytes = peak
        elif len(self.kinds) == 1:
            self._first_step_peak_bytes = max(self._first_step_peak_bytes or 0, peak)
        if self.kinds and self.kinds[-1] == "recorded":
            phase = self._phases.setdefault(name, PhaseStats())
            phase.peak_allocated_bytes = max(phase.peak_allocated_bytes or 0, peak)
            phase.peak_reserved_bytes = max(phase.peak_reserved_bytes or 0, reserved)
            phase.allocated_at_end_bytes = stats["allocated_bytes.all.current"]
            self._reserved_at_peak = max(self._reserved_at_peak, (reserved, peak))

    @contextmanager
    def _labelled_gradients(self, name: str) -> Iterator[None]:
        if self._training is None or name != "backward" or self.kinds[-1] != "recorded":
            yield
            return
        stop = watch_gradients(
            self._training.model, lambda gradient: self._label("gradients", gradient, True)
        )
        try:
            yield
        finally:
            stop()

    def _label_what_stays(self) -> None:
        assert self._training is not None
        for category, tensor in labelled_tensors(self._training):
            self._label(category, tensor, False)

    def _label(self, category: str, tensor: Tensor, now: bool) -> None:
        storage = storage_of(tensor)
        if storage.device.type == "cuda":
            moment = time.time_ns() // 1000 if now else None
            self._labels.append(Label(storage.data_ptr(), category, time_us=moment))
