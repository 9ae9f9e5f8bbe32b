"""Measuring a recipe: the real training step on a device, from setup to StepProfile."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from harness.attribution import breakdown_at, find_peak, top_allocations
from harness.errors import InputError
from harness.flops import FlopCount
from harness.loop import Kind, Step, run_steps, set_up, step_kinds
from harness.model import attention_kernel
from harness.provenance import provenance
from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step import Training
from harness.step_profile import (
    PHASES,
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


class Progress(Protocol):
    """Who is told about every finished step (console.py)."""

    def step(self, index: int, total: int, kind: Kind, loss: float, tokens_per_s: float | None) -> None: ...


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
    device = device or chosen_device()
    run = _Run(recipe, device, folder, progress, snapshot)
    try:
        run.to_the_end()
    except KeyboardInterrupt:
        if run.training is None:
            raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        run.out_of_memory(error)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # how torch's CPU allocator says it
            raise
        run.out_of_memory(error)
    profile = run.profile()
    if snapshot and (run.complete or run.oom):
        folder.write_snapshot(run.observer.snapshot())
    folder.write_profile(profile)
    return profile


def chosen_device(name: str | None = None) -> torch.device:
    """The device called `name` (cuda, cuda:1, cpu); for None the first GPU, else the CPU.

    Raises InputError for a device this machine does not have.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in ("cuda", "cpu") or not (index or "0").isdecimal() or int(index or 0) >= count:
        raise InputError(
            f"--device {name}: this machine has cpu and {torch.cuda.device_count()} GPUs (cuda:0, ...)."
        )
    return torch.device(name)


def _observer(device: torch.device, snapshot: bool) -> Any:
    if device.type == "cuda":
        from harness.measure_cuda import CudaObserver

        return CudaObserver(device, snapshot=snapshot)
    from harness.measure_cpu import CpuObserver

    return CpuObserver()


class _Run:
    """The state of one measured run, so that what is known so far survives an interruption."""

    def __init__(
        self, recipe: Recipe, device: torch.device, folder: RunFolder, progress: Progress, snapshot: bool
    ) -> None:
        self.recipe, self.device, self.folder, self.progress = recipe, device, folder, progress
        self.observer = _observer(device, snapshot)
        self.training: Training | None = None
        self.losses: list[float] = []
        self.complete = False
        self.oom: OutOfMemoryReport | None = None
        self.flop_count = FlopCount()
        self.phase_now = "setup"
        self.kinds = step_kinds(recipe, RECORDED_STEPS)

    def begin_step(self, index: int, kind: Kind) -> None:
        self.observer.begin_step(index, kind)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The observer's phase; FLOPs are counted in the first warmup step, which nobody times."""
        self.phase_now = self.flop_count.phase = name
        counted = len(self.losses) == 0 and self.kinds[0] == "warmup" and self.training is not None
        with self.observer.phase(name), self.flop_count if counted else nullcontext():
            yield

    def to_the_end(self) -> None:
        self.training, batches = set_up(self.recipe, self.device, self)
        self.observer.trained(self.training)
        for step in run_steps(self.training, batches, self.device, self.kinds, self):
            self.observer.end_step()
            self._note(step)
        self.complete = True

    def _note(self, step: Step) -> None:
        loss = float(step.loss)
        self.losses.append(loss)
        times_s = dict(self.observer.times_s[-1]) if step.kind == "timed" else {}
        tokens_per_s = self.recipe.tokens_per_step / times_s["step"] if times_s else None
        line = {"step": step.index, "kind": step.kind, "loss": loss, "num_tokens": step.num_tokens}
        if self.training is not None and self.training.scaler is not None:
            line["loss_scale"] = self.training.scaler.get_scale()
        self.folder.log({**line, **{f"{name}_s": seconds for name, seconds in times_s.items()}})
        self.progress.step(step.index, len(self.kinds), step.kind, loss, tokens_per_s)

    def out_of_memory(self, error: BaseException) -> None:
        tried = re.search(r"(?:allocate|allocating) ([\d.]+) ?([KMG]i?B|bytes)", str(error))
        units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        requested = int(float(tried[1]) * units[tried[2]]) if tried and tried[2] in units else None
        spans = self.observer.spans()
        self.oom = OutOfMemoryReport(
            phase=self.phase_now,
            requested_bytes=requested,
            top=top_allocations(spans, find_peak(spans).index) if spans else [],
        )
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            self.oom.free_bytes = torch.cuda.mem_get_info(self.device)[0]
            self.oom.reserved_unallocated_bytes = (
                stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
            )

    def profile(self) -> StepProfile:
        hardware: HardwareSummary = self.observer.hardware()
        return StepProfile(
            source="measured",
            recipe=self.recipe.model_dump(mode="json"),
            hardware=hardware,
            provenance={
                **provenance(),
                **self.observer.facts(),
                "attention": None if self.training is None else attention_kernel(self.training.model),
                "threads": torch.get_num_threads(),
            },
            complete=self.complete,
            memory=self._memory(),
            phases=self._phases(),
            step=self._step(hardware),
            top=self._top(),
            oom=self.oom,
        )

    def _memory(self) -> MemoryStats:
        memory: MemoryStats = self.observer.memory()
        phases: dict[str, PhaseStats] = self.observer.phase_memory()
        if not phases:
            return memory
        memory.peak_phase = max(phases, key=lambda name: phases[name].peak_allocated_bytes or 0)
        memory.peak_allocated_bytes = phases[memory.peak_phase].peak_allocated_bytes
        spans = self.observer.spans()
        if spans:
            memory.at_peak = breakdown_at(spans, find_peak(spans).index)
        return memory

    def _top(self) -> list[Any]:
        spans = self.observer.spans()
        return top_allocations(spans, find_peak(spans).index) if spans else []

    def _phases(self) -> dict[str, PhaseStats]:
        known: dict[str, PhaseStats] = self.observer.phase_memory()
        counted = bool(self.flop_count.flops)
        return {
            name: known.get(name, PhaseStats()).model_copy(
                update={
                    "time_s": _spread(self._timed(name)),
                    "flops": self.flop_count.flops.get(name, 0) if counted else None,
                }
            )
            for name in PHASES
        }

    def _step(self, hardware: HardwareSummary) -> StepStats:
        time_s = _spread(self._timed("step"))
        all_flops = sum(self.flop_count.flops.values()) or None
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
        steps = zip(self.kinds, self.observer.times_s, strict=False)
        finished = list(steps)[: len(self.losses)]
        return [times[name] for kind, times in finished if kind == "timed" and name in times]


def _spread(seconds: list[float]) -> TimeStats:
    if not seconds:
        return TimeStats()
    p10, median, p90 = (float(q) for q in np.percentile(seconds, [10, 50, 90]))
    return TimeStats(median=median, p10=p10, p90=p90, n=len(seconds))


def _peak_rss_bytes() -> int:
    """Resident memory of this process at its largest, or now where the system does not keep the peak."""
    try:
        import resource
    except ImportError:
        return psutil.Process(os.getpid()).memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024  # KiB on Linux, bytes on macOS
