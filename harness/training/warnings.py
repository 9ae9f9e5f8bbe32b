"""What a built model does otherwise than its recipe lets expect, in sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from harness.recipe import Recipe
from harness.units import in_gib

SMALLEST_SHARE = 0.05
"""Of all the base's bytes: what is less in 16 bit is not worth a warning."""


def surprises_of_model(recipe: Recipe, model: nn.Module) -> list[str]:
    """Warnings about quantization and adapters of `model`, as model.build_model returns it."""
    if not recipe.quantized:
        return []
    found = []
    experts = {
        name
        for module in model.modules()
        if hasattr(module, "parametrizations")
        for name in module.parametrizations  # type: ignore[union-attr]
    }
    if experts:
        elements = _elements_of_experts(model)
        found.append(
            f"quantization: {recipe.quantization}: the experts ({', '.join(sorted(experts))}) are stored in "
            "4 bit here, by bitsandbytes' replace_parameter_4bit. A script that only gives transformers a "
            f"BitsAndBytesConfig leaves them in 16 bit: {in_gib(elements * 2)} instead of "
            f"{in_gib(elements // 2)}"
        )
        if recipe.adapts_every_linear:
            found.append(
                "lora_targets: all-linear adapts the linear layers alone: experts stored in 4 bit cannot be "
                "adapted. They stay as they are"
            )
    left = _left_in_16_bit(model)
    total = sum(p.nbytes for p in model.parameters())
    if left and sum(left.values()) > SMALLEST_SHARE * total:
        names = ", ".join(sorted(left))
        found.append(
            f"quantization: {recipe.quantization}: bitsandbytes quantizes linear layers alone and leaves "
            f"{in_gib(sum(left.values()))} of {names} as they were"
        )
    return found


def _elements_of_experts(model: nn.Module) -> int:
    """Weights in all parametrized experts, by the shapes before they were packed."""
    return sum(
        state[0].quant_state.shape.numel()  # type: ignore[union-attr,index]
        for module in model.modules()
        if hasattr(module, "parametrizations")
        for state in module.parametrizations.values()  # type: ignore[union-attr]
    )


def _left_in_16_bit(model: nn.Module) -> dict[str, int]:
    """Bytes, by last name, of the frozen matrices that are not quantized; embeddings and head left out."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()  # type: ignore[operator]
    apart = {id(p) for table in [*tables, *([head] if head is not None else [])] for p in table.parameters()}
    left: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and parameter.is_floating_point() and not parameter.requires_grad
        if matrix and id(parameter) not in apart and not _quantized(parameter):
            path = name.replace(".base_layer", "")  # where peft keeps what it adapts
            left[".".join(path.rsplit(".", 2)[-2:])] += parameter.nbytes
    return left


def _quantized(parameter: Any) -> bool:
    return type(parameter).__name__ in ("Params4bit", "Int8Params")
