"""Measuring a recipe: the real training step on a device, from setup to StepProfile."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.attribution import breakdown_at, find_peak, top_allocations
from harness.device_observer import DeviceObserver, Progress
from harness.errors import InputError
from harness.flops import FlopCount
from harness.loop import Kind, LoopObserver, Step, run_steps, set_up, step_kinds
from harness.model import attention_kernel
from harness.oom import remedies
from harness.provenance import provenance
from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step import Training
from harness.step_profile import (
    PHASES,
    Allocation,
    HardwareSummary,
    MemoryStats,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)

RECORDED_STEPS = 2
"""Steps run under memory history, after the timed ones. The second begins where a step leaves the memory."""


def measure(
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress,
    device: torch.device | None = None,
    *,
    snapshot: bool = True,
) -> StepProfile:
    """Run the recipe, write its folder, and return what was measured.

    An interrupt or running out of memory gives a profile too, with `complete` false (and `oom` filled);
    whoever called decides on the exit status. Raises InputError for a recipe that cannot run here, before
    anything is written.
    """
    run = _Run(recipe, device or chosen_device(), folder, progress, snapshot)
    try:
        run.to_the_end()
    except KeyboardInterrupt:
        if run.training is None:
            raise
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        run.oom = run.observer.shortage(run.phase_now, error)
        memory = run.memory or run.look_back()  # while the traceback still holds the step's tensors
        run.oom.top = run.top
        run.oom.advice = remedies(recipe, memory.at_peak, run.oom)
    profile = run.profile()
    if snapshot and run.snapshot:
        folder.write_snapshot(run.snapshot)
    folder.write_profile(profile)
    return profile


def chosen_device(name: str | None = None) -> torch.device:
    """The device called `name` (cuda, cuda:1, cpu); for None the first GPU, else the CPU.

    Raises InputError for a device this machine does not have.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = ["cpu", *(["cuda"] if gpus else []), *gpus]
    if name not in here:
        raise InputError(f"--device {name}: this machine has {', '.join(here)}.")
    return torch.device(name)


@dataclass
class _Run:
    """The state of one measured run, so that what is known so far survives an interruption."""

    recipe: Recipe
    device: torch.device
    folder: RunFolder
    progress: Progress
    with_history: bool
    training: Training | None = None
    losses: list[float] = field(default_factory=list)
    complete: bool = False
    phase_now: str = "setup"
    flop_count: FlopCount = field(default_factory=FlopCount)
    oom: OutOfMemoryReport | None = None
    memory: MemoryStats | None = None
    top: list[Allocation] = field(default_factory=list)
    snapshot: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.observer = _observer(self.device, self.recipe, self.with_history)
        self.watching: LoopObserver = self.observer
        self.kinds = step_kinds(self.recipe, RECORDED_STEPS)

    def begin_step(self, index: int, kind: Kind) -> None:
        """See loop.LoopObserver."""
        self.watching.begin_step(index, kind)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See step.Observer."""
        self.phase_now = name
        with self.watching.phase(name):
            yield

    def to_the_end(self) -> None:
        self.training, batches = set_up(self.recipe, self.device, self)
        self.observer.trained(self.training)
        for step in run_steps(self.training, batches, self.device, self.kinds, self):
            self.observer.end_step()
            self._note(step)
        self.look_back()
        # One more step, which nobody times and whose memory nobody reads: counting is slow, and sees only
        # eager code.
        self.watching = self.flop_count
        with torch.compiler.set_stance("force_eager"):
            list(run_steps(self.training, batches, self.device, ["warmup"], self))
        self.complete = True

    def look_back(self) -> MemoryStats:
        """Ask the observer what the memory was, before later steps and deaths change the answer."""
        memory = self.memory = self.observer.memory()
        phases = self.observer.phase_memory()
        if phases:
            memory.peak_phase = max(phases, key=lambda name: phases[name].peak_allocated_bytes or 0)
            memory.peak_allocated_bytes = phases[memory.peak_phase].peak_allocated_bytes
        spans, self.snapshot = self.observer.history()
        if not spans or not (phases or self.oom):
            return memory  # interrupted before a step was recorded: the peak of a step is not known
        peak = find_peak(spans)
        memory.at_peak = breakdown_at(spans, peak.index)
        self.top = top_allocations(spans, peak.index)
        if memory.peak_allocated_bytes is None:
            memory.peak_allocated_bytes, memory.peak_phase = peak.allocated_bytes, peak.phase
        if memory.kind == "cuda_allocator" and memory.at_peak.other_bytes is not None:
            # The trace has requested sizes; what the allocator did not split off is known only in total.
            memory.at_peak.other_bytes += max(0, memory.peak_allocated_bytes - peak.allocated_bytes)
        return memory

    def profile(self) -> StepProfile:
        memory = self.memory or self.look_back()
        hardware = self.observer.hardware(self.recipe.compute_dtype)
        return StepProfile(
            source="measured",
            recipe=self.recipe.model_dump(mode="json"),
            hardware=hardware,
            provenance={**provenance(), **self.observer.facts(), **self._what_ran()},
            complete=self.complete,
            memory=memory,
            phases=self._phases(),
            step=self._step(hardware),
            top=self.top,
            oom=self.oom,
        )

    def _note(self, step: Step) -> None:
        loss = float(step.loss)
        self.losses.append(loss)
        times_s = dict(self.observer.times_s[-1]) if step.kind == "timed" else {}
        tokens_per_s = self.recipe.tokens_per_step / times_s["step"] if times_s else None
        line: dict[str, Any] = {"step": step.index, "kind": step.kind, "num_tokens": step.num_tokens}
        line["loss"] = loss if math.isfinite(loss) else None  # JSON has no nan
        if self.training is not None and self.training.scaler is not None:
            line["loss_scale"] = self.training.scaler.get_scale()
        self.folder.log({**line, **{f"{name}_s": seconds for name, seconds in times_s.items()}})
        peak_bytes = self.observer.peak_bytes()
        self.progress.step(step.index, len(self.kinds), step.kind, loss, tokens_per_s, peak_bytes)

    def _what_ran(self) -> dict[str, Any]:
        if self.training is None:
            return {}
        ran: dict[str, Any] = {"attention": attention_kernel(self.training.model)}
        if self.complete:
            ran["attention_kernels"] = sorted(self.flop_count.attention)
        if self.recipe.compile and self.device.type == "cpu":
            ran["recorded_steps"] = "eager: the memory of compiled code cannot be followed on a CPU"
        return ran

    def _phases(self) -> dict[str, PhaseStats]:
        known = self.observer.phase_memory()
        return {
            name: known.get(name, PhaseStats()).model_copy(
                update={
                    "time_s": _spread(self._timed(name)),
                    "flops": self.flop_count.flops.get(name, 0) if self.complete else None,
                }
            )
            for name in PHASES
        }

    def _step(self, hardware: HardwareSummary) -> StepStats:
        time_s = _spread(self._timed("step"))
        all_flops = sum(self.flop_count.flops.values()) if self.complete else None
        model_flops = all_flops and all_flops - self.flop_count.recomputed_flops
        ceiling = (hardware.peak_flops or 0) * (time_s.median or 0)
        return StepStats(
            time_s=time_s,
            tokens_per_s=self.recipe.tokens_per_step / time_s.median if time_s.median else None,
            model_flops=model_flops,
            mfu=model_flops / ceiling if model_flops and ceiling else None,
            hfu=all_flops / ceiling if all_flops and ceiling else None,
            loss=self.losses,
            gpu_utilization=self.observer.utilization(),
            host_rss_bytes=_peak_rss_bytes(),
        )

    def _timed(self, name: str) -> list[float]:
        """Seconds of `name` in every finished timed step."""
        finished = zip(self.kinds[: len(self.losses)], self.observer.times_s, strict=False)
        return [times[name] for kind, times in finished if kind == "timed" and name in times]


def _observer(device: torch.device, recipe: Recipe, with_history: bool) -> DeviceObserver:
    if device.type == "cuda":
        from harness.measure_cuda import CudaObserver

        return CudaObserver(device, with_history=with_history)
    from harness.measure_cpu import CpuObserver

    return CpuObserver(follow_first_step=not recipe.compile)


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's CPU allocator raises a plain RuntimeError
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _spread(seconds: list[float]) -> TimeStats:
    if not seconds:
        return TimeStats()
    p10, median, p90 = (float(q) for q in np.percentile(seconds, [10, 50, 90]))
    return TimeStats(median=median, p10=p10, p90=p90, n=len(seconds))


def _peak_rss_bytes() -> int:
    """Resident memory of this process at its largest."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux, bytes on macOS
