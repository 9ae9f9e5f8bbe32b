"""What every field of a recipe is checked for, whatever its type."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class Values(BaseModel):
    """Values as files and command lines give them; their fields are Fields'."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: Any) -> Any:
        # pydantic's lax mode would read `steps: true` as 1 and `gradient_checkpointing: 1` as true.
        assert info.field_name is not None
        wants_bool = cls.model_fields[info.field_name].annotation is bool
        if isinstance(value, bool) and not wants_bool:
            raise ValueError("true and false belong to switches")
        if wants_bool and not isinstance(value, bool):
            raise ValueError("a switch knows only true and false")
        return value

    @field_validator("model", "data", check_fields=False)
    @classmethod
    def _no_url(cls, value: str) -> str:
        # Recipes are written into every result, and URLs hold passwords.
        if "://" in value:
            raise ValueError("nothing is read from a URL; download it and give the path")
        return value

    @field_validator("offload", "lora_targets", mode="before", check_fields=False)
    @classmethod
    def _list_from_one(cls, value: Any, info: Any) -> Any:
        if info.field_name == "offload" and (value is None or value == "none"):
            return ()
        if isinstance(value, str) and value != "all-linear":  # q_proj,v_proj is handy on the command line
            return tuple(name.strip() for name in value.split(","))
        return value

    @field_validator("offload", "lora_targets", check_fields=False)
    @classmethod
    def _no_repeats(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if not isinstance(value, str) and len(set(value)) != len(value):
            raise ValueError("the same name is listed twice")
        return value
