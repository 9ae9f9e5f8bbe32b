"""The recipe: the fields of a fine-tuning step (fields.py), checked together (rules.py)."""

from pydantic import model_validator

from harness.recipe.derived import Derived
from harness.recipe.rules import first_broken_rule


class Recipe(Derived):
    """One fine-tuning step, fully described. Immutable; unknown fields and impossible pairs are errors."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # pydantic's own would hash each value, and `peft` is a mapping

    @model_validator(mode="after")
    def _possible(self) -> "Recipe":
        broken = first_broken_rule(self)
        if broken:
            raise ValueError(broken)
        return self
