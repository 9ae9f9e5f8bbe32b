"""What a toggle's file yields when the model, or the device, does not have what the toggle asks for."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """A field that must change."""

    sentence: str
    line: str
    """What to write instead."""
