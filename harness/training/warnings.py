"""What a built model does otherwise than its recipe lets expect, in sentences."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from harness.recipe import Recipe, surprises_of_quantization


def surprises_of_model(recipe: Recipe, model: nn.Module) -> list[str]:
    """Warnings about quantization and adapters of `model`, as model.build_model returns it."""
    if not recipe.quantized:
        return []
    experts = {
        name
        for module in model.modules()
        if hasattr(module, "parametrizations")
        for name in module.parametrizations  # type: ignore[union-attr]
    }
    return surprises_of_quantization(
        recipe,
        experts,
        _elements_of_experts(model),
        _left_in_16_bit(model),
        sum(p.nbytes for p in model.parameters()),
    )


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
    quantized = [module for module in model.modules() if _quantized(module)]
    apart |= {id(p) for module in quantized for p in module.parameters(recurse=False)}
    left: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and parameter.is_floating_point() and not parameter.requires_grad
        if matrix and id(parameter) not in apart:
            path = name.replace(".base_layer", "")  # where peft keeps what it adapts
            left[".".join(path.rsplit(".", 2)[-2:])] += parameter.nbytes
    return left


def _quantized(module: nn.Module) -> bool:
    """Asked of the module: under FSDP its weight is a DTensor, whose 16-bit numbers each hold four values."""
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt", "ParametrizationList")
