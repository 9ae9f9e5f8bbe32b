"""Times and rates of a measured run's phases and of its whole step."""

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.observe import FlopCount
from harness.step_profile import (
    OTHER_PHASES,
    PHASES,
    HardwareSummary,
    PhaseStats,
    StepStats,
    TimeStats,
)
from harness.training import Kind

Times = Sequence[Mapping[str, float]]
"""For every finished timed step, seconds by phase and of the whole "step"."""


def phase_stats(
    memory: Mapping[str, PhaseStats], times_s: Times, flop_count: FlopCount | None
) -> dict[str, PhaseStats]:
    """Statistics of every phase of a step, and of other phases that occurred: the given memory, the times,
    and the FLOPs if they were counted.
    """
    seen = {*memory, *(name for times in times_s for name in times)}
    return {
        name: memory.get(name, PhaseStats()).model_copy(
            update={
                "time_s": _spread(times_s, name),
                "flops": flop_count.flops.get(name, 0) if flop_count and name in PHASES else None,
            }
        )
        for name in (*PHASES, *(other for other in OTHER_PHASES if other in seen))
    }


def step_stats(
    tokens: int | None, hardware: HardwareSummary, times_s: Times, flop_count: FlopCount | None
) -> StepStats:
    """The step's time, its tokens per second, and its FLOPs as a share of what `hardware` can do. `tokens`:
    of one step of all ranks."""
    flops, recomputed = (flop_count.flops, flop_count.recomputed_flops) if flop_count else (None, 0)
    return StepStats.of(_spread(times_s, "step"), tokens, flops, recomputed, hardware.peak_flops)


def log_line(
    index: int, kind: Kind, tokens: int | None, loss: float | None, times_s: Mapping[str, float]
) -> dict[str, Any]:
    """A step's line in log.jsonl; `times_s` as in Times. A loss that is not finite is null, and `not_finite`
    says what it was."""
    line: dict[str, Any] = {"step": index, "kind": kind, "num_tokens": tokens, "loss": loss}
    if loss is not None and not math.isfinite(loss):
        line |= {"loss": None, "not_finite": str(loss)}  # JSON has no nan
    return line | {f"{name}_s": seconds for name, seconds in times_s.items()}


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux, bytes on macOS


def _spread(times_s: Times, name: str) -> TimeStats:
    """Median and percentiles of the times called `name`."""
    seconds = [times[name] for times in times_s if name in times]
    if not seconds:
        return TimeStats()
    p10, median, p90 = (float(q) for q in np.percentile(seconds, [10, 50, 90]))
    return TimeStats(median=median, p10=p10, p90=p90, n=len(seconds))
