"""What the fields of a profile are made of: counts, quantities, and what none of its parts allows."""

from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, strict=True)]
"""Bytes, FLOPs, steps. Strict: true is no 1, and text no number."""
Quantity = Annotated[float, Field(ge=0, strict=True)]
"""Seconds, rates, shares; never nan, which is not at least 0."""

MAX_DETAILS = 10_000
MAX_DEPTH = 50
"""Of a recipe, and of a provenance: every value is a line of a report."""


def _few(details: dict[str, Any]) -> dict[str, Any]:
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


Details = Annotated[dict[str, Any], AfterValidator(_few)]


class Fields(BaseModel):
    """Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null")
