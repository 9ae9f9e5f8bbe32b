"""Types of a recipe's fields, and the checks that every field goes through, whatever its type."""

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Precision = Literal["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
Quantization = Literal["none", "nf4", "fp4", "int8"]
Adapter = Literal["none", "lora", "ia3", "peft"]
Attention = Literal[
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
]
Optimizer = Literal[
    "adamw",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw",
    "adafactor",
    "sgd",
    "lion_8bit",
    "muon",
    "adamw_schedule_free",
    "galore_adamw",
    "apollo_adamw",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
]
Offload = Literal["activations", "checkpoints", "optimizer", "parameters"]
Task = Literal["sft", "dpo", "kto", "orpo", "grpo", "reward", "classification", "embedding"]
Parallel = Literal["none", "ddp", "fsdp", "tp", "fsdp+tp"]
Wrap = Literal["block", "accelerate", "transformers"]

Count = Annotated[int, Field(gt=0, lt=2**31)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Values(BaseModel):
    """The base of Fields, without fields. It reads values as recipe files and command lines spell them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: Any) -> Any:
        # pydantic's lax mode would read `steps: true` as 1 and `gradient_checkpointing: 1` as true.
        wants_bool = info.field_name in _switches(cls)
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

    @field_validator("offload", "lora_targets", "image_size", mode="before", check_fields=False)
    @classmethod
    def _list_from_one(cls, value: Any, info: Any) -> Any:
        """A single value, or names with commas between, as a list."""
        if info.field_name == "offload" and (value is None or value == "none"):
            return ()
        if isinstance(value, int):  # image_size=1024
            return (value,)
        if isinstance(value, str) and value != "all-linear":  # q_proj,v_proj is handy on the command line
            return tuple(name.strip() for name in value.split(","))
        return value

    @field_validator("offload", "lora_targets", check_fields=False)
    @classmethod
    def _no_repeats(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if not isinstance(value, str) and len(set(value)) != len(value):
            raise ValueError("the same name is listed twice")
        return value


@cache  # pydantic looks for a class's fields anew each time, and a page that asks checks hundreds of recipes
def _switches(values: type[BaseModel]) -> frozenset[str]:
    """Names of the fields that are true or false."""
    return frozenset(name for name, field in values.model_fields.items() if field.annotation is bool)
