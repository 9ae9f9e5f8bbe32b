"""What a checkpoint says about its run, and whether a recipe is the run's own. Imports no torch."""

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.architecture import config_here
from harness.errors import InputError
from harness.recipe import Recipe, fields_that_change, shown

MAY_CHANGE = fields_that_change("run")
"""Recipe fields that do not affect a step's values. All others must be as they were."""
OF_THE_MESH = ("dp_replicate", "dp_shard", "tp", "micro_batch_size", "gradient_accumulation_steps")
"""On several ranks these may change too: the number of ranks, and how a step's rows are spread on them."""


class SavedState(BaseModel):
    """A checkpoint's state.json."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    steps_done: int = Field(ge=0)
    losses: list[float | None]
    """The loss of each step done; null where it was not finite."""
    data: dict[str, Any]
    """The position in the data (Batches.state)."""
    recipe: dict[str, Any]
    content: dict[str, str | None]
    """The `content_of` of the recipe."""
    frozen: str
    """A digest of a sample of the frozen weights."""
    versions: dict[str, str]
    """The versions of the libraries that affect values."""
    state: Any
    """Optimizer, scaler, buffers and random numbers, as `take_apart` writes them (tree.py)."""

    @model_validator(mode="after")
    def _one_loss_a_step(self) -> "SavedState":
        if len(self.losses) != self.steps_done:
            raise ValueError("losses and steps_done do not agree")
        return self


def content_of(recipe: Recipe) -> dict[str, str | None]:
    """SHA-256 of the model's config and of the file that `data` names; None for one that is no local file.

    Their paths may change from machine to machine; what is in them may not.
    """
    paths = {"model": config_here(recipe.model), "data": Path(os.path.expanduser(recipe.data))}
    return {field: _digest(path) if path and os.path.isfile(path) else None for field, path in paths.items()}


def refuse_another_recipe(checkpoint: Path, saved: SavedState, recipe: Recipe) -> None:
    """Raise InputError naming the first field that matters and is not what it was."""
    then, now = saved.recipe, recipe.model_dump(mode="json")
    content_now = content_of(recipe)
    may_change = (*MAY_CHANGE, *(OF_THE_MESH if recipe.distributed else ()))
    for field in [*now, *(name for name in then if name not in now)]:
        default = Recipe.model_fields[field].default if field in now else None
        before, after = then.get(field, default), now.get(field)
        files = saved.content.get(field), content_now.get(field)
        same = files[0] == files[1] if all(files) else before == after
        if same or field in may_change:
            continue
        change = f"{shown(after)} here, {shown(before)} there"
        raise InputError(
            f"--resume: {checkpoint}: {field}: {change if before != after else 'the file has changed'}. "
            "Resume with the recipe the run began with (its recipe.yaml is in the checkpoint); only "
            f"{', '.join(may_change)} may change."
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
