"""What each toggle of a recipe does to the model, the optimizer or the step, in a file for each toggle."""

from typing import NamedTuple


class Problem(NamedTuple):
    """Why a toggle cannot be used with the model or the device."""

    sentence: str
    line: str
    """The line of a recipe to write instead."""
