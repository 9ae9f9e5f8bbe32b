"""Recipe: the fields of a fine-tuning step (fields.py), validated together (rules.py)."""

from __future__ import annotations

from pydantic import model_validator

from harness.recipe.fields import Fields
from harness.recipe.rules import first_broken_rule


class Recipe(Fields):
    """One fine-tuning step, fully described. Immutable; unknown fields and impossible pairs are errors."""

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        broken = first_broken_rule(self)
        if broken:
            raise ValueError(broken)
        return self
