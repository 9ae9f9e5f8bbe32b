"""A measurement with its progress on stderr: for every command that runs a recipe here."""

from __future__ import annotations

from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step_profile import StepProfile


def measured_with_progress(
    recipe: Recipe, folder: RunFolder, device: str | None = None, *, snapshot: bool = True
) -> StepProfile:
    """See answers/one_answer.py: `measured`."""
    from harness.answers import measured
    from harness.cli.terminal.progress import RunProgress
    from harness.cli.terminal.terminal import Terminal
    from harness.measure import total_steps

    with RunProgress(Terminal(stderr=True), total_steps(recipe)) as progress:
        return measured(recipe, folder, device, progress, snapshot=snapshot)
