"""A step's times: those of its phases, and how fast it is as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from harness.step_profile.fields import Count, Fields, Quantity

MAX_MODULES = 10_000


class TimeStats(Fields):
    """Seconds over the timed steps. A prediction has n = 0, and p10 and p90 if its uncertainty is known."""

    median: Quantity | None = None
    p10: Quantity | None = None
    p90: Quantity | None = None
    n: Count = 0


class PhaseStats(Fields):
    """One phase of one step; with accumulation, all its micro batches together."""

    time_s: TimeStats = Field(default_factory=TimeStats)
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    allocated_at_end_bytes: Count | None = None
    flops: Count | None = None
    bytes_moved: Count | None = None
    communication_s: Quantity | None = None
    """Seconds of one step on several ranks in which this rank only communicated, or waited for communication.
    Known to a simulation, and to a run over gloo, from a step of its own under PyTorch's profiler."""
    kernels_s: dict[str, Quantity] = Field(default_factory=dict[str, Quantity], max_length=100)
    """Seconds that the device worked on each class of kernel (product, attention, norm, elementwise...).
    Known to a simulation only."""
    modules_s: dict[str, Quantity] = Field(default_factory=dict[str, Quantity], max_length=MAX_MODULES)
    """The same by module, layers of one kind together (model.layers.*.mlp). The empty name stands for the
    model itself and for what belongs to no module."""


class StepStats(Fields):
    """The whole optimizer step."""

    time_s: TimeStats = Field(default_factory=TimeStats)
    tokens_per_s: Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)] | None = None
    """Tokens per second of all ranks together."""
    model_flops: Count | None = None
    """FLOPs of forward and backward, without recomputation (what MFU counts)."""
    mfu: Quantity | None = None
    hfu: Quantity | None = None
    """Like MFU, with the recomputed FLOPs."""
    bound: Literal["compute", "memory", "host"] | None = None
    loss: list[Annotated[float, Field(strict=True)] | None] | None = None
    """One loss per step run, warmup and the steps before a resume included. null: nan or infinite."""
    gpu_utilization: Quantity | None = None
    """Mean of NVML's busy fraction over the timed steps, 0 to 1."""
    host_rss_bytes: Count | None = None
    """Resident memory of the process at its largest."""

    @classmethod
    def of(
        cls,
        time_s: TimeStats,
        tokens: int | None,
        flops: Mapping[str, int] | None,
        recomputed_flops: int,
        peak_flops: float | None,
        bound: Literal["compute", "memory", "host"] | None = None,
    ) -> StepStats:
        """The step's speed, and the use that it makes of a device with `peak_flops` FLOP/s. `tokens`: of all
        ranks together; `flops`: by phase, those of backward with the `recomputed_flops`, and those of the
        optimizer's step, which are not the model's. None for what is not known."""
        all_flops = model_flops = None
        if flops is not None:
            all_flops = sum(each for phase, each in flops.items() if phase != "optimizer_step")
            model_flops = all_flops - recomputed_flops
        return cls(
            time_s=time_s,
            tokens_per_s=tokens / time_s.median if tokens and time_s.median else None,
            model_flops=model_flops,
            mfu=utilization(model_flops, time_s.median, peak_flops),
            hfu=utilization(all_flops, time_s.median, peak_flops),
            bound=bound,
        )

    def tokens_per_s_range(self) -> tuple[float, float] | None:
        """Tokens per second of a step at the 90th and at the 10th percentile; None where one is not known."""
        time = self.time_s
        if not (self.tokens_per_s and time.median and time.p10 and time.p90):
            return None
        tokens = self.tokens_per_s * time.median
        return tokens / time.p90, tokens / time.p10


def utilization(flops: int | None, seconds: float | None, peak_flops_per_s: float | None) -> float | None:
    """`flops` as a share of what the device could do in `seconds`: MFU of the model's FLOPs, HFU of all.

    None where one of them is not known.
    """
    ceiling = (seconds or 0) * (peak_flops_per_s or 0)
    return flops / ceiling if flops and ceiling else None
