"""The least time that a measurement on a CPU will take, estimated before it begins."""

from dataclasses import dataclass

from harness.errors import InputError
from harness.hardware import DEFAULT_HARDWARE, find_hardware
from harness.recipe import Recipe

NOT_WORTH_ASKING_FLOPS = 1e12
"""A whole run of fewer FLOPs takes any CPU only seconds, and gets no forecast."""


@dataclass(frozen=True)
class Forecast:
    """The time that the matrix products of a run will take, which is a lower bound of the run's time."""

    steps: int
    flops_per_step: int
    """The FLOPs of a step's matrix products, with those that gradient checkpointing computes again."""
    flops_per_s: float
    """The speed of a matrix product on this machine, measured just before."""
    dtype: str
    """The dtype of that matrix product: the recipe's compute dtype."""

    @property
    def step_s(self) -> float:
        """The least time of a step, in seconds."""
        return self.flops_per_step / self.flops_per_s

    @property
    def run_s(self) -> float:
        """The least time of all steps, in seconds."""
        return self.steps * self.step_s


def forecast_on_cpu(recipe: Recipe) -> Forecast | None:
    """The forecast from napkin's FLOPs and the speed of a matrix product that is tried now; None for a run of
    few FLOPs, and for a model whose FLOPs napkin does not know."""
    from harness.measure import matmul_flops_per_s, total_steps
    from harness.napkin import estimate, step_time

    try:
        time = step_time(estimate(recipe, find_hardware(DEFAULT_HARDWARE)))
    except InputError:
        return None
    steps, flops = total_steps(recipe), time.flops
    if steps * flops < NOT_WORTH_ASKING_FLOPS:
        return None
    dtype = recipe.compute_dtype
    return Forecast(steps, flops, matmul_flops_per_s(dtype), dtype)
