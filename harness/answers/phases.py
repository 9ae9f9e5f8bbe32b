"""What follows the training steps, as --phases and `phases=` name it. Imports torch when it is called."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from harness.errors import InputError, nearest

if TYPE_CHECKING:
    from harness.recipe import Recipe
    from harness.training import AfterStep

PHASES_OF_A_RUN = ("train", "eval", "save")
"""The names of the phases that can be asked for."""


def after_training(
    recipe: "Recipe",
    phases: str,
    evaluation: Mapping[str, tuple[str, int | bool]],
    named: str = "phases=",
    *,
    whole_state: bool = False,
) -> "AfterStep | None":
    """What follows the training steps, as `phases` says, such as "train,eval,save"; None for "train" alone.

    `evaluation` holds a field of Evaluation and its value by the option that sets it, and `named` is how
    `phases` is written where the user sets it: both are for messages. With `whole_state` rank 0 gathers a
    divided model for its checkpoint. Raises InputError for a phase or a field that does not exist, and for an
    option whose phase is not asked for.
    """
    names = [name.strip() for name in phases.split(",")]
    for name in names:
        if name not in PHASES_OF_A_RUN:
            hint = nearest(name, PHASES_OF_A_RUN)
            raise InputError(f"{named}{phases}: there is no phase {name}.{hint} Write train,eval,save.")
    if "train" not in names:
        raise InputError(
            f"{named}{phases}: what follows the training steps needs them. Write train,{phases}."
        )
    if evaluation and "eval" not in names:
        option = next(iter(evaluation))
        raise InputError(f"{option} belongs to an evaluation. Write {named}train,eval too.")
    if whole_state and not (recipe.fsdp or recipe.tensor_parallel):
        raise InputError(
            "the whole state is gathered where a model is divided among ranks. Set parallel=fsdp, or leave "
            "the option out: one process writes it whole anyway."
        )
    if whole_state and "save" not in names:
        raise InputError(f"the whole state belongs to a checkpoint. Write {named}train,save too.")
    if len({*names}) == 1:
        return None
    from harness.training import AfterStep, Evaluation

    known = [field.name for field in fields(Evaluation)]
    for field, _ in evaluation.values():
        if field not in known:
            hint = nearest(field, known)
            raise InputError(f"evaluation: there is no {field}.{hint} It has {', '.join(known)}.")
    settings: dict[str, Any] = {field: value for field, value in evaluation.values()}
    return AfterStep(Evaluation(**settings) if "eval" in names else None, "save" in names, whole_state)
