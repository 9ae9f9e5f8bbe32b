"""The types of a recipe's fields: names to choose from, and numbers in a range."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Precision = Literal["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
Quantization = Literal["none", "nf4", "fp4", "int8"]
Adapter = Literal["none", "lora", "ia3", "peft"]
Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]
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
]
Offload = Literal["activations", "optimizer", "parameters"]
Parallel = Literal["none", "ddp", "fsdp", "tp", "fsdp+tp"]
Wrap = Literal["block", "accelerate", "transformers"]

Count = Annotated[int, Field(gt=0, lt=2**31)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
