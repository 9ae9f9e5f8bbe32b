"""What quantization leaves otherwise than a recipe lets expect, in sentences. Who knows the model counts."""

from collections.abc import Collection, Mapping

from harness.recipe.recipe import Recipe
from harness.units import in_gib

SMALLEST_SHARE = 0.05
"""Of all the model's bytes: what is less in 16 bit is not worth a warning."""


def surprises_of_quantization(
    recipe: Recipe,
    experts: Collection[str],
    expert_elements: int,
    left_bytes: Mapping[str, int],
    model_bytes: int,
) -> list[str]:
    """Warnings about a quantized model; none for another.

    `experts`: names of the stacked parameters that are in 4 bit, of `expert_elements` weights together.
    `left_bytes`: bytes of the frozen matrices that are not quantized, by name, without embeddings and head;
    `model_bytes`: of all parameters.
    """
    if not recipe.quantized:
        return []
    found: list[str] = []
    if experts:
        found.append(
            f"quantization: {recipe.quantization}: the experts ({', '.join(sorted(experts))}) are stored in "
            "4 bit here, by bitsandbytes' replace_parameter_4bit. A script that only gives transformers a "
            f"BitsAndBytesConfig leaves them in 16 bit: {in_gib(expert_elements * 2)} instead of "
            f"{in_gib(expert_elements // 2)}"
        )
        if recipe.adapts_every_linear:
            found.append(
                "lora_targets: all-linear adapts the linear layers alone: experts stored in 4 bit cannot be "
                "adapted. They stay as they are"
            )
    left = sum(left_bytes.values())
    if left > SMALLEST_SHARE * model_bytes:
        found.append(
            f"quantization: {recipe.quantization}: bitsandbytes quantizes linear layers alone and leaves "
            f"{in_gib(left)} of {', '.join(sorted(left_bytes))} as they were"
        )
    return found
