"""The types of a profile's fields, counts and quantities, and the limits that every part of it has."""

from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, strict=True)]
"""A number of bytes, FLOPs or steps. Strict: neither true nor text is taken for a number."""
Quantity = Annotated[float, Field(ge=0, strict=True)]
"""Seconds, a rate or a share. Never nan, which is not at least 0."""

MAX_DETAILS = 10_000
MAX_DEPTH = 50
"""Limits of `Details` (a recipe, a provenance): every value in it is a line of a report."""


def _within_limits(details: dict[str, Any]) -> dict[str, Any]:
    left = MAX_DETAILS
    waiting: list[tuple[object, int]] = [(details, 1)]
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        held = cast("dict[str, object] | list[object]", value)
        inside = list(held.values()) if isinstance(held, dict) else held
        left -= len(inside)
        if left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DETAILS:,} values, or nested deeper than {MAX_DEPTH}")
        waiting += [(inner, depth + 1) for inner in inside]
    return details


Details = Annotated[dict[str, Any], AfterValidator(_within_limits)]
"""Facts by name, as JSON has them, with at most MAX_DETAILS values."""


class Fields(BaseModel):
    """A part of a profile. Names that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null")
