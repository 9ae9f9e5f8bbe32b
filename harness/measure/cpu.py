"""Measuring a run on the CPU: phase times from the clock, memory as the bytes of live tensors.

The CPU has no allocator with counters, so "allocated" is here what a StorageTracker counts, called
`live_tensors` in a profile. The tracker costs time, so it is off while a step is timed. It cannot see into
compiled code, so the steps that it follows run eager.
"""

import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from harness.measure.observer import DeviceObserver, History
from harness.observe import (
    Owner,
    PhasePeaks,
    Recording,
    StorageTracker,
    failed_request,
    gradients_seen,
    labelled_tensors,
)
from harness.parallel import loaded_by_one_thread
from harness.snapshot import snapshot_of_storages
from harness.step_profile import PHASES_BETWEEN_STEPS, HardwareSummary, MemoryStats, OutOfMemoryReport
from harness.training import HostPeak, Kind


class CpuObserver(DeviceObserver):
    """Times every phase; follows storages in setup, in the recorded steps and, unless `follow_first_step` is
    false, in the first warmup step."""

    def __init__(self, *, follow_first_step: bool = True) -> None:
        self._follow_first_step = follow_first_step
        self.times_s: list[dict[str, float]] = []
        self._kinds: list[Kind] = []
        self._recording = Recording(clocked=True)
        self._tracker = _RealTensors(self._recording, frames=True)
        self._training: Owner | None = None
        self.peaks = PhasePeaks()
        self._follows = True
        """Whether every tensor is followed now."""
        self._started = 0.0
        self._ends: list[int] = []
        self._recorded: list[int] = []
        self._ran_out: int | None = None
        """These three: see History's step_ends, steps and ran_out."""

    def trained(self, training: Owner) -> None:
        self._training = training

    def label(self, category: str, tensor: Tensor) -> None:
        """A tensor that was not seen being made (in a worker process) is followed from now on."""
        if self._follows:
            self._recording.label(self._tracker.adopt(tensor), category)

    def begin_step(self, index: int, kind: Kind) -> None:
        if kind == "recorded" and "recorded" not in self._kinds:
            self._adopt()
            self._recording.restart()
        self._kinds.append(kind)
        first = self._follow_first_step and self._kinds == ["warmup"]
        self._follows = kind == "recorded" or first
        if kind == "recorded":
            self._recorded.append(index)
        self.times_s.append(defaultdict(float))
        self._started = time.perf_counter()

    def end_step(self, running: int = 0) -> None:
        """On the CPU nothing is queued, so `running` does not matter."""
        self.times_s[-1]["step"] = time.perf_counter() - self._started
        if self._kinds[-1] == "recorded":
            self._ends.append(self._recording.last_event)

    def phase(self, name: str) -> AbstractContextManager[None]:
        self._recording.phase = name
        return self._followed(name) if self._follows else _Timed(self.times_s[-1], name)

    @contextmanager
    def _followed(self, name: str) -> Iterator[None]:
        self._recording.reset_peak()
        try:
            gradients = gradients_seen(self._training, name, self._label_gradient)
            with loaded_by_one_thread(), torch.compiler.set_stance("force_eager"), self._tracker, gradients:
                yield
        finally:
            self.peaks.note(name, self._kinds, self._recording.peak_bytes, self._recording.allocated_bytes)

    def peak_bytes(self) -> int | None:
        peaks = self.peaks.phases.items()
        recorded = (s.peak_allocated_bytes or 0 for name, s in peaks if name not in PHASES_BETWEEN_STEPS)
        return max(recorded, default=None) or self.peaks.first_step_bytes

    def memory(self) -> MemoryStats:
        return MemoryStats(
            kind="live_tensors",
            host_bytes=self._recording.host_peak_bytes or None,
            setup_peak_allocated_bytes=self.peaks.setup_bytes,
            first_step_peak_allocated_bytes=self.peaks.first_step_bytes,
        )

    def host_peak(self) -> HostPeak:
        return self._recording.host_peak()

    def history(self) -> History:
        """The snapshot's addresses are synthetic."""
        if "recorded" not in self._kinds:  # a run that ended early
            self._adopt()
        spans = list(self._recording.spans)
        return History(
            spans,
            snapshot_of_storages(spans, self._recording.times_us),
            self._ends,
            self._recorded,
            self._ran_out,
        )

    def shortage(self, phase: str, error: BaseException) -> OutOfMemoryReport:
        self._ran_out = self._recording.last_event
        tried = re.search(r"tried to allocate (\d+) bytes", str(error))  # c10/core/impl/alloc_cpu.cpp
        return OutOfMemoryReport(
            phase=phase,
            **failed_request(error, int(tried[1]) if tried else None),
            free_bytes=psutil.virtual_memory().available,
        )

    def hardware(self, dtype: str) -> HardwareSummary:
        """Without ceilings: the speed of a CPU is in no table."""
        return HardwareSummary(name=cpu_name(), kind="cpu", memory_bytes=psutil.virtual_memory().total)

    def facts(self) -> dict[str, Any]:
        return {"threads": torch.get_num_threads()}

    def _label_gradient(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._recording.label(self._tracker.key_of(weight.grad), "gradients")

    def _adopt(self) -> None:
        """Follow and label what stays, even if it was made in steps that were not followed."""
        if self._training is None:  # out of memory in setup
            return
        for category, tensor in labelled_tensors(self._training):
            self._recording.label(self._tracker.adopt(tensor), category)


class _Timed:
    """A context that adds a phase's seconds to those of its step, unless it ends with an exception."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._seconds[self._name] += time.perf_counter() - self._start


class _RealTensors(StorageTracker):
    """A tracker that stays beneath all other dispatch modes: a mode of the program may begin before it and
    end while it is active, and a mode that ends removes the innermost one, whichever that is.
    """

    def push(self) -> None:
        above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        for mode in [self, *reversed(above)]:
            _push_mode(mode)

    def pop(self, *_: object) -> None:
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def follows(self, storage: torch.UntypedStorage) -> bool:
        """Not those of shape-only tensors, which take no memory and which libraries make to build models."""
        return storage.device.type != "meta"


def cpu_name() -> str:
    """The CPU's name as Linux has it; on macOS and others the instruction set."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
