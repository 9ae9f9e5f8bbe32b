"""Arguments of the questions in Python, held against the types that each function names. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from harness.errors import InputError

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def checked(question: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """`question`, which raises InputError for an argument of another type. Nothing is converted."""
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True, strict=True))(question)

    @wraps(question)
    def asked(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        try:
            return validated(*arguments, **options)
        except ValidationError as error:
            if error.title != question.__name__:
                raise
            wrong = error.errors(include_url=False)[0]
            name, where = question.__name__, wrong["loc"][0]
            if isinstance(where, int):  # not by name
                where = [*signature(question).parameters][min(where, len(signature(question).parameters) - 1)]
            given = "" if wrong["type"] == "missing_argument" else f"={wrong['input']!r:.80}"
            message = f"{wrong['msg'][0].lower()}{wrong['msg'][1:]}"
            raise InputError(
                f"harness.{name}: {where}{given}: {message}. help(harness.{name}) says what it takes."
            ) from None

    return asked
