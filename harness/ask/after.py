"""What a question looks at behind the training steps: an evaluation, a checkpoint. A simulation tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness.errors import InputError
from harness.recipe import shortened, shown
from harness.system import parse_yaml

_Many = Annotated[int, Field(gt=0, lt=2**31)]


class After(BaseModel):
    """As the options of `harness simulate`, with `after` for what --phases adds to train."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    after: tuple[Literal["eval", "save"], ...] = ()
    """Behind the training steps: an evaluation as transformers' Trainer does it, and its checkpoint."""
    eval_batches: _Many | None = None
    """How many batches an evaluation has; empty: 10."""
    eval_batch_size: _Many | None = None
    """Their rows, per_device_eval_batch_size; empty: 8."""
    eval_accumulation_steps: _Many | None = None
    """After so many batches logits go to the host; empty: at the end."""
    eval_loss_only: bool = False
    """Keep no logits: prediction_loss_only, or no compute_metrics."""
    full_state_dict: bool = False
    """Where the model is divided among ranks: rank 0 gathers it and writes it whole."""

    @field_validator("after", mode="before")
    @classmethod
    def _list_from_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def options(self) -> list[str]:
        """As `harness simulate` takes them."""
        words = ["--phases", ",".join(["train", *self.after])] if self.after else []
        for name, value in self.model_dump(exclude={"after"}, exclude_defaults=True).items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    @property
    def evaluation(self) -> dict[str, tuple[str, int | bool]]:
        """Fields of an Evaluation and their values, by the names here."""
        given = dict[str, tuple[str, int | bool]]()
        for name in ("eval_batches", "eval_batch_size", "eval_accumulation_steps"):
            if getattr(self, name) is not None:
                given[name] = (name.removeprefix("eval_"), getattr(self, name))
        return given | ({"eval_loss_only": ("keep_logits", False)} if self.eval_loss_only else {})


def read_after(said: Mapping[str, str]) -> After:
    """From the fields of a question. Raises InputError for a value that cannot be, and for one that belongs
    to an evaluation or a checkpoint that is not asked for."""
    given = {name: parse_yaml(said[name], name) for name in After.model_fields if said.get(name)}
    try:
        found = After.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        name, problem = str(wrong["loc"][0]), wrong["msg"][0].lower() + wrong["msg"][1:]
        raise InputError(f"{name}: {shortened(shown(given[name]))} is not possible: {problem}.") from None
    if found.evaluation and "eval" not in found.after:
        raise InputError(f"{next(iter(found.evaluation))} belongs to an evaluation. Set after: eval too.")
    if found.full_state_dict and "save" not in found.after:
        raise InputError("full_state_dict belongs to a checkpoint. Set after: save too.")
    return found
