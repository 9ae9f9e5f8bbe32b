"""A measurement with its progress on stderr, for every command that runs a recipe on this machine."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.cli.terminal.progress import RunProgress
from harness.cli.terminal.terminal import Terminal, say
from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step_profile import StepProfile
from harness.units import duration

if TYPE_CHECKING:
    from harness.answers import Forecast
    from harness.training import AfterStep

LONG_S = 60
"""A run on a CPU that takes more seconds than this is announced."""


def measured_with_progress(
    recipe: Recipe,
    folder: RunFolder,
    device: str | None = None,
    *,
    snapshot: bool = True,
    after: "AfterStep | None" = None,
    quiet: bool = False,
    alive: Callable[[str], None] | None = None,
) -> StepProfile:
    """`measured` (answers/one_answer.py) with its progress on stderr. A run on a CPU that takes more than
    LONG_S says so when its first step begins. With `quiet`, for all ranks but one, nothing is shown.
    """
    from harness.answers import forecast_on_cpu, measured
    from harness.measure import chosen_device, total_steps

    if quiet:
        return measured(recipe, folder, device, snapshot=snapshot, after=after, alive=alive)
    log = Terminal(stderr=True)
    forecast = forecast_on_cpu(recipe) if chosen_device(device).type == "cpu" else None
    announcement = iter(in_words(forecast) if forecast is not None and forecast.run_s >= LONG_S else ())

    def began(doing: str) -> None:
        if doing != "setup":  # setup may still refuse the recipe
            for line in announcement:  # whose lines are used up the first time
                say(log, line)
        if alive is not None:
            alive(doing)

    with RunProgress(log, total_steps(recipe), forecast and forecast.step_s) as progress:
        return measured(recipe, folder, device, progress, snapshot=snapshot, after=after, alive=began)


def in_words(forecast: "Forecast") -> list[str]:
    """Two sentences: how long the run will take and why, and what answers sooner."""

    how_long = (
        f"This run takes at least {duration(forecast.run_s)} on this CPU: {forecast.steps} steps of "
        f"{forecast.flops_per_step / 1e12:,.1f} TFLOP each, at the {forecast.flops_per_s / 1e9:,.0f} GFLOP/s "
        f"that a {forecast.dtype} matrix product reached here just now."
    )
    instead = (
        "`harness simulate` with the same recipe tells in seconds what a GPU would need for it, and "
        "`harness run smoke` measures a small model here. Ctrl-C ends it, with a profile of the "
        "steps done so far."
    )
    return [how_long, instead]
