"""What a rule about a pair of recipe fields is."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.recipe.derived import Derived


@dataclass(frozen=True)
class Rule:
    """See rules.py."""

    fields: tuple[str, str]
    broken: Callable[[Derived], bool]
    message: str
