"""Measures a run on a GPU: by CUDA events, the caching allocator's own statistics and history, and NVML.

While a step is timed only two events are recorded in each phase. Peaks are read in the other steps.
Written against torch 2.11 to 2.15, where `_record_memory_history(enabled=None)` forgets the trace but a
block keeps the stack it was allocated with, `_snapshot` shows every device, and the memory metadata belong
to the calling thread (autograd's own thread has none: see cuda_trace.stated_phases).
"""

import gc
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from harness.hardware import TABLE_NAMES, Nvml, find_hardware
from harness.measure.device_memory import DeviceMemory, SharedMemory
from harness.measure.observer import DeviceObserver, History
from harness.measure.virtual_time import VirtualTime
from harness.observe import (
    Owner,
    PhasePeaks,
    failed_request,
    gradients_seen,
    labelled_tensors,
    module_paths,
    storage_of,
)
from harness.snapshot import (
    BEFORE_RECORDING,
    AllocationSpan,
    Label,
    label_snapshot,
    phase_metadata,
    requested_in,
    spans_from_trace,
    step_ends,
)
from harness.step_profile import PHASES_BETWEEN_STEPS, HardwareSummary, MemoryStats, OutOfMemoryReport
from harness.training import Kind
from harness.virtual_gpu import start_clock

_Events = list[tuple[str, torch.cuda.Event, torch.cuda.Event]]
"""The name, begin and end of each phase, in their order."""

_PAGE_BYTES = 4096
"""Less pinned memory than this does not count: single values are read back through it."""


class CudaObserver(DeviceObserver):
    """Records events around every phase, and statistics and a history outside the timed steps."""

    def __init__(self, device: torch.device, *, with_history: bool, joins: bool = False) -> None:
        """`joins`: the program has run for a while, and sees its memory's counters as if nothing watched it.
        The peak of its setup is the counter's so far; every step that is not timed has a history.
        """
        self.device = torch.device("cuda", device.index or 0)
        self.times_s: list[dict[str, float]] = []
        self._index = device.index or 0
        self._kinds: list[Kind] = []
        self._recorded: list[int] = []
        self._nvml = Nvml(str(torch.cuda.get_device_properties(self.device).uuid))
        self._utilization: float | None = None
        self._with_history = with_history
        self._events: _Events = []
        self._ended: deque[tuple[dict[str, float], _Events]] = deque()
        self._in_step = False
        self._labels: list[Label] = []
        self._training: Owner | None = None
        self._paths: dict[int, str] = {}
        """The module of each weight, by the weight's id, when the last backward began."""
        self._at_shortage: tuple[int, int] | None = None
        """`_free_bytes` when memory ran out."""
        self._watch_for_shortage()
        self._joins = joins
        self._memory = SharedMemory(self._index) if joins else DeviceMemory(self._index)
        self._virtual_time = VirtualTime(self._index)
        self.peaks = PhasePeaks(all_steps=joins)
        self._highest = (0, "")
        """The most bytes allocated in the training steps, and the phase in which."""
        self._highest_recorded = (0, "")
        """The same since the history began."""
        self._reserved_at_peak: tuple[int, int] = (0, 0)
        """The highest reserved peak of a phase, and its allocated peak."""
        self._end_bytes: list[int] = []
        if joins:
            start_clock()
            self.peaks.setup_bytes = self._memory.counted().allocated_peak
        else:
            torch.cuda.set_device(self.device)
            self._record_history(True)

    def trained(self, training: Owner) -> None:
        self._training = training

    def label(self, category: str, tensor: Tensor) -> None:
        """The label has the time: the tensor's address may be another tensor's later."""
        if self._kinds and (self._kinds[-1] == "recorded" or (self._joins and self._kinds[-1] == "warmup")):
            self._labels.extend(_label(category, tensor, time.time_ns() // 1000))

    def begin_step(self, index: int, kind: Kind) -> None:
        before = self._kinds[-1] if self._kinds else "warmup"
        if kind != before and before == "timed":
            self._utilization = self._nvml.utilization()
        if kind != before or (self._joins and kind == "warmup"):
            self._record_history(kind == "recorded" or (self._joins and kind == "warmup"))
            self._labels.clear()  # their addresses may hold something else by now
            self._recorded.clear()
            self._highest_recorded = (0, "")
        if kind != before and kind == "timed":
            self._nvml.start()
        if kind == "recorded" or (self._joins and kind == "warmup"):
            self._recorded.append(index)
        self._kinds.append(kind)
        self._in_step = True
        self.times_s.append(defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._kinds and self._kinds[-1] == "timed":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if name in PHASES_BETWEEN_STEPS:
                self._note_highest("")
                self._memory.reset_peaks()
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            if name in PHASES_BETWEEN_STEPS:
                self._note_peak(name)
                self._memory.reset_peaks()
            return
        self._memory.reset_peaks()
        torch.cuda.memory._set_memory_metadata(phase_metadata(name, len(self._kinds) - 1))
        begun_us = self._virtual_time.mark()
        if name == "backward" and self._training is not None:
            self._paths = module_paths(self._training)
        try:
            with gradients_seen(self._training, name, self._label_gradient):
                yield
        finally:
            torch.cuda.memory._set_memory_metadata("")
            ended_us = self._virtual_time.mark()
            self._note_peak(name)
            if self._joins and self._in_step and begun_us is not None and ended_us is not None:
                for each in (name, "step"):
                    self.times_s[-1][each] += (ended_us - begun_us) * 1e-6

    def end_step(self, running: int = 0) -> None:
        """The one synchronization of a step; with `running`, of an earlier step's events alone."""
        self._in_step = False
        self._ended.append((self.times_s[-1], self._events))
        self._events = []
        if not running:
            torch.cuda.synchronize(self.device)
        while self._ended:
            times_s, events = self._ended[0]
            if running and events and not events[-1][2].query():
                if len(self._ended) <= running:
                    break
                events[-1][2].synchronize()
            for name, start, end in events:
                times_s[name] += start.elapsed_time(end) / 1e3
            if events:
                times_s["step"] = events[0][1].elapsed_time(events[-1][2]) / 1e3
            self._ended.popleft()
        if self._kinds[-1] == "timed":  # the allocator's own count, kept on the host
            self._end_bytes.append(self._note_highest(""))

    def step_end_bytes(self) -> list[int]:
        return self._end_bytes

    def peak_bytes(self) -> int | None:
        return self._highest[0] or None

    def peak_reserved_bytes(self) -> int | None:
        by_phase = (stats.peak_reserved_bytes or 0 for stats in self.peaks.phases.values())
        return max(self._memory.counted().reserved_peak, *by_phase, 0)

    def memory(self) -> MemoryStats:
        """The allocator's and the driver's numbers."""
        reserved, allocated = self._reserved_at_peak
        process_bytes = self._nvml.process_bytes()
        now_reserved, most_reserved = self._memory.counted().reserved, self._memory.highest().reserved_peak
        return MemoryStats(
            kind="cuda_allocator",
            peak_reserved_bytes=reserved or None,
            process_bytes=process_bytes
            if process_bytes is None or not self._joins
            else process_bytes + most_reserved - now_reserved,
            host_bytes=self._host_bytes(),
            fragmentation_bytes=reserved - allocated if reserved else None,
            # NVML may know less of a process than PyTorch has reserved: then nothing is known of the context
            cuda_context_bytes=None
            if process_bytes is None or process_bytes < now_reserved
            else process_bytes - now_reserved,
            setup_peak_allocated_bytes=self.peaks.setup_bytes,
            first_step_peak_allocated_bytes=self.peaks.first_step_bytes,
        )

    def history(self) -> History:
        """The history since recording last began; the snapshot has the categories."""
        if not self._with_history:
            return History([], {}, [])
        snapshot = self._memory.snapshot()
        segments = [segment for segment in snapshot["segments"] if segment["device"] == self._index]
        labels = [*self._labels, *self._what_stays()]
        spans = spans_from_trace(snapshot["device_traces"][self._index], labels, segments)
        if self._training is None:  # out of memory in setup, which builds nothing but the model
            for span in spans:
                span.category = "parameters"
        trace = snapshot["device_traces"][self._index]
        if self._joins:
            _label_workspaces(spans, step_ends(trace)[: -1 if self._in_step else None])
        label_snapshot(snapshot, spans, self._index)
        self._virtual_time.mark()
        self._virtual_time.put_into(trace)
        ran_out = (n for n in reversed(range(len(trace))) if trace[n]["action"] == "oom")
        ends = step_ends(trace) if self._recorded else []
        return History(spans, snapshot, ends, [*self._recorded], next(ran_out, None), self._highest_recorded)

    def shortage(self, phase: str, error: BaseException) -> OutOfMemoryReport:
        """Without a history the requested bytes are those of torch's message, which are rounded."""
        free_bytes, reserved_unallocated_bytes = self._at_shortage or self._free_bytes()
        return OutOfMemoryReport(
            phase=phase,
            **failed_request(error, self._failed_request() or requested_in(str(error))),
            free_bytes=free_bytes,
            reserved_unallocated_bytes=reserved_unallocated_bytes,
        )

    def _free_bytes(self) -> tuple[int, int]:
        """The bytes that are free on the device, and those that are reserved but not allocated."""
        stats = torch.cuda.memory_stats(self.device)
        cached = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        return torch.cuda.mem_get_info(self.device)[0], cached

    def _watch_for_shortage(self) -> None:
        """Read `_free_bytes` at the moment when memory runs out: the exception, on its way up, frees what
        only an expression held."""
        this = weakref.ref(self)

        def ran_out(*_: Any) -> None:
            observer = this()
            if observer is not None:
                observer._at_shortage = observer._free_bytes()

        torch._C._cuda_attach_out_of_memory_observer(ran_out)  # type: ignore[attr-defined]

    def hardware(self, dtype: str) -> HardwareSummary:
        """With the datasheet's ceilings where the table has the device."""
        properties = torch.cuda.get_device_properties(self.device)
        summary = HardwareSummary(name=properties.name, kind="cuda", memory_bytes=properties.total_memory)
        if properties.name in TABLE_NAMES:
            hardware = find_hardware(TABLE_NAMES[properties.name])
            summary.memory_bandwidth = hardware.memory_bandwidth
            summary.peak_flops = hardware.peak_flops(dtype) if hardware.supports(dtype) else None
        return summary

    def facts(self) -> dict[str, Any]:
        capability = torch.cuda.get_device_capability(self.device)
        return {
            "driver": self._nvml.driver(),
            "nvml_unavailable": self._nvml.unavailable,
            "cuda": torch.version.cuda,
            "compute_capability": f"{capability[0]}.{capability[1]}",
            "device_used_bytes": self._nvml.used_bytes(),
            "num_alloc_retries": torch.cuda.memory_stats(self.device)["num_alloc_retries"],
            "threads": torch.get_num_threads(),
        }

    def utilization(self) -> float | None:
        """The mean of NVML's samples."""
        return self._nvml.utilization() if self._kinds[-1:] == ["timed"] else self._utilization

    def _record_history(self, on: bool) -> None:
        if not self._with_history:
            return
        self._virtual_time.mark()
        self._memory.record(on)

    def _note_peak(self, name: str) -> None:
        counted = self._memory.counted()
        self.peaks.note(name, self._kinds, counted.allocated_peak, counted.allocated, counted.reserved_peak)
        if self._kinds and name not in PHASES_BETWEEN_STEPS:
            self._note_highest(name)

    def _note_highest(self, phase: str) -> int:
        """Note a training step's peaks since the counters' last reset. Returns the bytes allocated now."""
        counted = self._memory.counted()
        self._highest = max(self._highest, (counted.allocated_peak, phase), key=itemgetter(0))
        self._highest_recorded = max(
            self._highest_recorded, (counted.allocated_peak, phase), key=itemgetter(0)
        )
        if self._joins or self._kinds[-1] == "recorded":
            self._reserved_at_peak = max(
                self._reserved_at_peak, (counted.reserved_peak, counted.allocated_peak)
            )
        return counted.allocated

    def _label_gradient(self, weight: Tensor) -> None:
        assert weight.grad is not None
        module = self._paths.get(id(weight))
        self._labels.extend(_label("gradients", weight.grad, time.time_ns() // 1000, module))

    def _what_stays(self) -> list[Label]:
        """The labels of what is live at the end: parameters and optimizer state."""
        if self._training is None:
            return []
        paths = module_paths(self._training)
        labelled = labelled_tensors(self._training)
        return [label for category, t in labelled for label in _label(category, t, module=paths.get(id(t)))]

    def _host_bytes(self) -> int | None:
        """Pinned memory, and what else in host memory belongs to the training: paged or offloaded states.

        Pinned memory counts as PyTorch took it, in powers of two. "active_bytes" would be wrong: torch does
        not subtract what is freed there (up to 2.12 at least; pytorch pull request 182404).
        """
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        labelled = labelled_tensors(self._training) if self._training is not None else ()
        others = {
            storage.data_ptr(): storage.nbytes()
            for _, tensor in labelled
            if tensor.device.type == "cpu" and tensor.dim() > 0 and not tensor.is_pinned()
            for storage in [storage_of(tensor)]
        }
        found = pinned + sum(others.values())
        return found if found >= _PAGE_BYTES else None

    def _failed_request(self) -> int | None:
        if not self._with_history:
            return None
        trace = reversed(self._memory.snapshot()["device_traces"][self._index])
        return next((entry["size"] for entry in trace if entry["action"] == "oom"), None)


def _label_workspaces(spans: list[AllocationSpan], ends: list[int]) -> None:
    """Label as `other` what steps allocated, is still live after their end, and is held by no Python tensor:
    a library keeps it, as cuBLAS keeps its workspaces. `ends`: the index of each ended step's last event.
    """
    last = ends[-1] if ends else BEFORE_RECORDING
    left = [s for s in spans if s.category is None and s.died is None and BEFORE_RECORDING < s.born <= last]
    if not left:
        return
    # not isinstance: it would ask every object of every library for its __class__
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    held = {label.address for tensor in tensors for label in _label_if_it_has_memory(tensor)}
    for span in left:
        if span.address not in held:
            span.category = "other"


def _label_if_it_has_memory(tensor: Tensor) -> list[Label]:
    """The label of `tensor`'s memory; none for a tensor without a storage of its own."""
    try:
        return _label("", tensor)
    except (RuntimeError, NotImplementedError):  # a sparse or fake tensor, an uninitialized parameter
        return []


def _label(
    category: str, tensor: Tensor, time_us: int | None = None, module: str | None = None
) -> list[Label]:
    """The label of `tensor`'s memory, if it is on a GPU."""
    storage = storage_of(tensor)
    return [Label(storage.data_ptr(), category, module, time_us)] if storage.device.type == "cuda" else []
