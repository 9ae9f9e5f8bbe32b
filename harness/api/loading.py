"""Recipes, profiles and snapshots from their files. Imports no torch."""

import os
from pathlib import Path
from typing import Any

from harness.api.arguments import AnyRecipe, asked_recipe, checked
from harness.recipe import Recipe
from harness.step_profile import StepProfile

Location = str | os.PathLike[str]


@checked
def load_recipe(recipe: AnyRecipe, **overrides: Any) -> Recipe:
    """The recipe called so in recipes/, or of a YAML file, with these fields changed, all of them checked.

    Raises InputError for a missing or malformed file, an unknown field, a wrong value, or two fields that
    exclude each other.
    """
    return asked_recipe(recipe, overrides)[1]


@checked
def load_profile(path: Location) -> StepProfile:
    """The profile of a run folder, or in a profile.json. Raises InputError if there is none."""
    from harness.run_folder import read_profile

    return read_profile(Path(path))


@checked
def load_snapshot(path: Location) -> dict[str, Any]:
    """The memory history of a run folder, or in a snapshot.pickle or .json, of harness or of PyTorch.

    The structure is that of torch.cuda.memory._snapshot: `segments`, and `device_traces` with a list of
    events a device. A pickle is read as plain data: nothing in it runs, whoever made it. Raises InputError
    for a file that is missing, too large, or no snapshot.
    """
    from harness.snapshot import read_snapshot

    return read_snapshot(_inside(path, "snapshot.pickle", "snapshot.json"))


def _inside(path: Location, *names: str) -> Path:
    """The first file of these names that is in a folder, or else would be; a file as it is."""
    if not os.path.isdir(path):
        return Path(path)
    return next(
        (Path(path, name) for name in names if os.path.lexists(Path(path, name))), Path(path, names[0])
    )
