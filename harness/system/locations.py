"""Where recipes and profiles are: in a checkout, or in the installed package."""

from pathlib import Path

from harness.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package `harness`. In a checkout, recipes and profiles are next to it."""


def profiles_folder() -> Path:
    """The folder of profiles: that of an installed package, which has calibrations only, or that of the
    checkout, which need not exist."""
    installed = PACKAGE / "profiles"
    return installed if installed.is_dir() else PACKAGE.parent / "profiles"


def recipes_folder() -> Path:
    """The folder of recipes: an installed package's own, or the checkout's, or else `recipes` in the
    current folder.

    Raises InputError if there is none.
    """
    candidates = (PACKAGE / "recipes", PACKAGE.parent / "recipes", Path.cwd() / "recipes")
    for folder in candidates:
        if (folder / "models").is_dir():
            return folder
    looked = " and ".join(map(str, candidates))
    raise InputError(
        f"there is no folder of recipes: looked for {looked}. Run inside a checkout of harness, "
        "or give the path of a recipe file and of a model config."
    )
