"""The type of a rule about a pair of recipe fields."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.recipe.derived import Derived


@dataclass(frozen=True)
class Rule:
    """Two fields with values that cannot be used together; rules.py lists them all."""

    fields: tuple[str, str]
    """Names of the two fields, as the message shows them."""
    broken: Callable[[Derived], bool]
    """Whether a recipe has such values."""
    message: str
    """Why it is impossible, and what to set instead."""
