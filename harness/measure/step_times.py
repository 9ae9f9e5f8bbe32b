"""The numbers of a measured run: times and rates of its phases and of the whole step."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from harness.observe import FlopCount
from harness.recipe import Recipe
from harness.step_profile import PHASES, HardwareSummary, PhaseStats, StepStats, TimeStats, utilization

Times = Sequence[Mapping[str, float]]
"""Of every finished timed step: seconds by phase, and of the whole "step"."""


def phase_stats(
    memory: Mapping[str, PhaseStats], times_s: Times, flop_count: FlopCount | None
) -> dict[str, PhaseStats]:
    """Every phase: its memory as given, its times, its FLOPs where they were counted."""
    return {
        name: memory.get(name, PhaseStats()).model_copy(
            update={
                "time_s": _spread(times_s, name),
                "flops": None if flop_count is None else flop_count.flops.get(name, 0),
            }
        )
        for name in PHASES
    }


def step_stats(
    recipe: Recipe, hardware: HardwareSummary, times_s: Times, flop_count: FlopCount | None
) -> StepStats:
    """Time, tokens per second of all ranks, and FLOPs as a share of what `hardware` could do in that time."""
    time_s = _spread(times_s, "step")
    all_flops = None if flop_count is None else sum(flop_count.flops.values())
    model_flops = all_flops and flop_count and all_flops - flop_count.recomputed_flops
    return StepStats(
        time_s=time_s,
        tokens_per_s=recipe.global_tokens_per_step / time_s.median if time_s.median else None,
        model_flops=model_flops,
        mfu=utilization(model_flops, time_s.median, hardware.peak_flops),
        hfu=utilization(all_flops, time_s.median, hardware.peak_flops),
    )


def peak_rss_bytes() -> int:
    """Resident memory of this process at its largest."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux, bytes on macOS


def _spread(times_s: Times, name: str) -> TimeStats:
    seconds = [times[name] for times in times_s if name in times]
    if not seconds:
        return TimeStats()
    p10, median, p90 = (float(q) for q in np.percentile(seconds, [10, 50, 90]))
    return TimeStats(median=median, p10=p10, p90=p90, n=len(seconds))
