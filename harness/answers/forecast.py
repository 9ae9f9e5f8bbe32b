"""How long a measurement on a CPU will take at least, known before it begins."""

from dataclasses import dataclass

from harness.errors import InputError
from harness.hardware import DEFAULT_HARDWARE, find_hardware
from harness.recipe import Recipe

NOT_WORTH_ASKING_FLOPS = 1e12
"""Of a whole run: any CPU is done with it in seconds."""


@dataclass(frozen=True)
class Forecast:
    """What a run's matrix products alone will take."""

    steps: int
    flops_per_step: int
    """With what gradient checkpointing computes again."""
    flops_per_s: float
    """Of a matrix product on this machine, a moment ago."""
    dtype: str

    @property
    def step_s(self) -> float:
        """Seconds of a step, at least: nothing but its matrix products is counted."""
        return self.flops_per_step / self.flops_per_s

    @property
    def run_s(self) -> float:
        """Seconds of all steps, at least."""
        return self.steps * self.step_s


def forecast_on_cpu(recipe: Recipe) -> Forecast | None:
    """From napkin's FLOPs and a matrix product tried here; None for a small run, and for a model whose FLOPs
    napkin does not know."""
    from harness.measure import matmul_flops_per_s, total_steps
    from harness.napkin import Timing, estimate

    try:
        timing = Timing(estimate(recipe, find_hardware(DEFAULT_HARDWARE)).sizes)
    except InputError:
        return None
    steps = total_steps(recipe)
    if steps * timing.hardware_flops < NOT_WORTH_ASKING_FLOPS:
        return None
    dtype = recipe.compute_dtype
    return Forecast(steps, timing.hardware_flops, matmul_flops_per_s(dtype), dtype)
