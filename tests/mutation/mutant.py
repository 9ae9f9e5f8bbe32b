"""One change of one file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    path: str
    """From the root of the checkout."""
    line: int
    was: str
    """The lines that change, in one, without indentation."""
    becomes: str
    source: str
    """The whole file as changed."""
    in_function: bool
    """Not what runs when the module is imported."""
    nth: int = 0
    """How many like it stand above."""

    @property
    def key(self) -> str:
        """The same for as long as these lines and this change are the same, wherever the lines are."""
        return hashlib.sha256(f"{self.path}\n{self.was}\n{self.becomes}\n{self.nth}".encode()).hexdigest()
