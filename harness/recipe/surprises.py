"""Warnings about a quantized model that differs from what the recipe's author may expect."""

from collections.abc import Collection, Mapping

from harness.recipe.recipe import Recipe
from harness.units import in_gib

SMALLEST_SHARE = 0.05
"""The share of the model's bytes in 16 bit from which on a warning is given."""


def surprises_of_quantization(
    recipe: Recipe,
    experts: Collection[str],
    expert_elements: int,
    left_bytes: Mapping[str, int],
    model_bytes: int,
) -> list[str]:
    """The warnings; none for a model that is not quantized. The caller counts what the model has.

    `experts`: names of the stacked parameters that are in 4 bit; `expert_elements`: how many weights they
    have together. `left_bytes`: bytes of each frozen matrix that is not quantized, by name, without
    embeddings and head. `model_bytes`: bytes of all parameters.
    """
    if not recipe.quantized:
        return []
    warnings: list[str] = []
    if experts:
        warnings.append(
            f"quantization: {recipe.quantization}: the experts ({', '.join(sorted(experts))}) are stored in "
            "4 bit here, by bitsandbytes' replace_parameter_4bit. A script that only gives transformers a "
            f"BitsAndBytesConfig leaves them in 16 bit: {in_gib(expert_elements * 2)} instead of "
            f"{in_gib(expert_elements // 2)}"
        )
        if recipe.adapts_every_linear:
            warnings.append(
                "lora_targets: all-linear adapts the linear layers alone: experts stored in 4 bit cannot be "
                "adapted. They stay as they are"
            )
    left = sum(left_bytes.values())
    if left > SMALLEST_SHARE * model_bytes:
        warnings.append(
            f"quantization: {recipe.quantization}: bitsandbytes quantizes linear layers alone and leaves "
            f"{in_gib(left)} of {', '.join(sorted(left_bytes))} as they were"
        )
    return warnings
