"""What the fields of a profile are made of: counts, quantities, and what none of its parts allows."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, strict=True)]
"""Bytes, FLOPs, steps. Strict: true is no 1, and text no number."""
Quantity = Annotated[float, Field(ge=0, strict=True)]
"""Seconds, rates, shares; never nan, which is not at least 0."""


class Fields(BaseModel):
    """Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null")
