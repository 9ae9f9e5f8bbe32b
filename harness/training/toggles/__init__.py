"""What each toggle of a recipe does to the model, the optimizer or the step: one file a toggle."""

from typing import NamedTuple


class Problem(NamedTuple):
    """What a toggle's file yields when the model, or the device, does not have what the toggle asks for."""

    sentence: str
    line: str
    """What to write instead."""
