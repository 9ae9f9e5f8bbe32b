"""Recipes, profiles and snapshots from their files. Imports no torch."""

import os
from pathlib import Path
from typing import Any

from harness.api.arguments import AnyRecipe, asked_recipe, checked
from harness.recipe import Recipe
from harness.run_folder import read_profile
from harness.snapshot import read_snapshot
from harness.step_profile import StepProfile

Location = str | os.PathLike[str]
"""The path of a run folder or of a file."""


@checked
def load_recipe(recipe: AnyRecipe, **overrides: Any) -> Recipe:
    """The recipe of that name in recipes/, or in a YAML file, changed by the overrides, every field checked.

    Raises InputError for a missing or malformed file, an unknown field, a wrong value, or two fields that
    exclude each other.
    """
    return asked_recipe(recipe, overrides)[1]


@checked
def load_profile(path: Location) -> StepProfile:
    """The profile of a run folder, or in a profile.json. Raises InputError if there is none."""
    return read_profile(Path(path))


@checked
def load_snapshot(path: Location) -> dict[str, Any]:
    """The memory history of a run folder, or in a snapshot.pickle or .json, of harness or of PyTorch.

    The structure is that of torch.cuda.memory._snapshot: `segments`, and `device_traces` with a list of
    events a device. A pickle is read as plain data: nothing in it runs, whoever made it. Raises InputError
    for a file that is missing, too large, or no snapshot.
    """
    file = Path(path)
    if os.path.isdir(file):
        names = ("snapshot.pickle", "snapshot.json")
        file = next((file / name for name in names if os.path.lexists(file / name)), file / names[0])
    return read_snapshot(file)
