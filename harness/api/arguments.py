"""The arguments that every question has: a recipe with overrides, and a device. Imports no torch."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeGuard, TypeVar

from pydantic import ConfigDict, SkipValidation, ValidationError, validate_call

from harness.answers import after_training
from harness.architecture import with_attention
from harness.data import check_data
from harness.errors import InputError, wrong_value
from harness.hardware import Hardware, hardware_names, split_hardware
from harness.recipe import Recipe, changed_recipe, load_recipe

if TYPE_CHECKING:
    from harness.training import AfterStep

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def checked(question: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """A decorator: `question` then raises InputError for an argument of another type. None is converted."""
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True, strict=True))(question)

    @wraps(question)
    def checked_question(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        try:
            return validated(*arguments, **options)
        except ValidationError as error:
            if error.title != question.__name__:
                raise
            wrong = error.errors(include_url=False)[0]
            name, where = question.__name__, wrong["loc"][0]
            if isinstance(where, int):  # not by name
                where = [*signature(question).parameters][min(where, len(signature(question).parameters) - 1)]
            raise InputError(
                f"harness.{name}: {where}{wrong_value(wrong)} help(harness.{name}) says what it takes."
            ) from None

    return checked_question


AnyRecipe = Annotated[Recipe | str | os.PathLike[str], SkipValidation]
"""A recipe, its name in recipes/, or the path of its YAML file. `asked_recipe` checks it."""
DeviceName = Annotated[str, SkipValidation]
"""The name of a device of the table. `asked_hardware` checks it."""
FEWEST_BYTES = 1000
"""A smaller number for a memory is taken to be meant in GiB, and refused with what to write."""
UNNAMED = "recipe"
"""The name of a Recipe that comes from no file."""


def _is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)


def asked_recipe(recipe: object, overrides: Mapping[str, Any]) -> tuple[str, Recipe]:
    """The name and the recipe that an AnyRecipe and `overrides` describe, with the attention that its model
    has. Raises InputError, also for data that cannot be read."""
    changes = {name: os.fspath(value) if _is_path(value) else value for name, value in overrides.items()}
    if isinstance(recipe, Recipe):
        # checked also without changes, since a Recipe made by model_copy is not
        name, loaded = UNNAMED, changed_recipe(recipe, changes)
    elif _is_path(recipe):
        name, loaded = load_recipe(os.fspath(recipe), changes)
    else:
        raise InputError(
            f"a recipe is a name, a path or a harness.Recipe, and no {type(recipe).__name__}. "
            "`harness recipes` lists the names."
        )
    check_data(loaded)
    loaded = with_attention(loaded)
    return name, loaded


def asked_after(
    recipe: Recipe, phases: str, evaluation: Mapping[str, int | bool] | None, *, full_state_dict: bool = False
) -> "AfterStep | None":
    """What follows the training steps, by the arguments of harness.simulate and harness.run of these names;
    None for nothing. Raises InputError."""
    given = {f"evaluation {field}": (field, value) for field, value in (evaluation or {}).items()}
    return after_training(recipe, phases, given, whole_state=full_state_dict)


def asked_hardware(hardware: object, memory: str | int | None) -> Hardware:
    """The device of that name in the table, with a memory of `memory` (as in "16GiB", or bytes) if that is
    given. Raises InputError."""
    if not isinstance(hardware, str):
        names = ", ".join(hardware_names())
        raise InputError(f"hardware: {hardware!r:.80} is no name of a device. The table has {names}.")
    if isinstance(memory, int) and 0 < memory < FEWEST_BYTES:
        raise InputError(
            f"memory={memory}: a number is in bytes, and no device has so few. Write "
            f"memory='{memory}GiB' or memory={memory} * 2**30."
        )
    size = f"{max(0, memory)}B" if isinstance(memory, int) else memory
    return split_hardware([f"hardware={hardware}"], size)[0]
