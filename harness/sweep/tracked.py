"""A sweep for experiment trackers: a run a cell, with its recipe and its numbers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.sweep.plan import Plan
from harness.sweep.processes import Row
from harness.track import Job, profile_values, recipe_config


def tracked_cells(plan: Plan, rows: Iterable[Row], folder: Path, files: Sequence[Path]) -> list[Job]:
    """A job for each cell that was asked now and has a profile, and one that keeps the sweep's own `files`.

    A cell that was there already was told when it was asked. The tracker's name is left to whoever tells.
    """
    jobs: list[Job] = []
    for row in rows:
        recipe, profile = row.cell.recipe, row.outcome.profile
        if row.kept or recipe is None or profile is None:
            continue
        config = recipe_config(recipe.model_dump(mode="json"))
        config |= {"hardware": profile.hardware.name, "status": row.outcome.status}
        jobs.append(Job("", str(folder), f"{plan.name} {row.cell.label}", config, profile_values(profile)))
    if jobs:
        config = recipe_config({"recipe": plan.name, "source": plan.kind, **plan.axes})
        jobs.append(Job("", str(folder), f"{plan.name} sweep", config, {}, [str(file) for file in files]))
    return jobs
