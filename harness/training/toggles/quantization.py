"""The toggle `quantization`: which weights bitsandbytes stores, and how random ones are made so that only one
layer at a time is in 16 bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import needed
from harness.parallel import DTYPES
from harness.recipe import Recipe


def prepare_for_kbit(recipe: Recipe, model: Any) -> None:
    """With `upcast_for_kbit`, have peft make all weights fp32 that are still in 16 bit."""
    if not recipe.upcast_for_kbit:
        return
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


MIXTURE_PARAMETERS = ("gate_up_proj", "down_proj")
"""Names of expert weights, each of which is one 3-dimensional parameter for all experts of a layer. They are
no nn.Linear, so transformers leaves them in 16 bit. Here they are quantized too, as QLoRA needs."""


def quantized_on_loading(recipe: Recipe) -> dict[str, Any]:
    """The arguments of transformers' from_pretrained that are about quantization."""
    return {"quantization_config": _bitsandbytes_config(recipe)} if recipe.quantized else {}


def _bitsandbytes_config(recipe: Recipe) -> Any:
    """transformers' BitsAndBytesConfig with every field set (its defaults are fp4, fp32 compute)."""
    from transformers import BitsAndBytesConfig

    if recipe.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=recipe.quantization,
        bnb_4bit_use_double_quant=recipe.double_quant,
        bnb_4bit_compute_dtype=DTYPES[recipe.compute_dtype],
        # FSDP divides only tensors of floats, so packed bytes have the dtype that FSDP gathers floats in
        bnb_4bit_quant_storage=DTYPES[recipe.compute_dtype] if recipe.fsdp else torch.uint8,
    )


def build_random(
    recipe: Recipe, build: Callable[[], nn.Module], device: torch.device, *, later: bool = False
) -> nn.Module:
    """The model that `build` makes, with random weights. If the recipe quantizes, layer after layer is
    quantized, so that at most one is in 16 bit at a time; with `later` none is yet, and `quantize_linear`
    quantizes each layer when it has its weights.

    Quantized are the layers that transformers quantizes when it loads a checkpoint: every linear layer but
    the output head and what is tied to it.
    """
    if not recipe.quantized:
        with device:
            return build()
    with needed("bitsandbytes", None, f"quantization: {recipe.quantization}"):
        import bitsandbytes as bnb
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    # on the meta device, without the modes of an observer: it would count these tensors in a simulation
    with _disable_current_modes():
        with torch.device("meta"):
            model = build()
        replace_with_bnb_linear(model, get_keys_to_not_convert(model), _bitsandbytes_config(recipe))
    dtype = next(model.parameters()).dtype
    for module in list(model.modules()):  # a list: modules that quantizing experts adds must not be emptied
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            _make_linear(model, module, dtype, device, later)
        elif _empty(module, device):
            model._init_weights(module)  # type: ignore[operator]
            if not later:
                quantize_experts(recipe, module)
    model.tie_weights()  # type: ignore[operator]
    flag = "is_loaded_in_8bit" if recipe.quantization == "int8" else "is_loaded_in_4bit"
    setattr(model, flag, True)  # peft reads it to choose its quantized layers
    # transformers reads it for flash attention with queries that a norm made fp32: a weight's dtype is uint8
    model.config._is_quantized = True  # type: ignore[union-attr]
    return model


def _empty(module: nn.Module, device: torch.device) -> bool:
    """Replace the parameters and buffers of `module` itself, tied ones too, by uninitialized ones on
    `device`. Whether it has any."""
    for name, shape in module._parameters.items():
        if shape is not None:
            new = torch.empty(shape.shape, dtype=shape.dtype, device=device)
            module._parameters[name] = nn.Parameter(new, shape.requires_grad)
    for name, shape in module._buffers.items():
        if shape is not None:
            module._buffers[name] = torch.empty(shape.shape, dtype=shape.dtype, device=device)
    return any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))


def _make_linear(model: nn.Module, layer: Any, dtype: torch.dtype, device: torch.device, later: bool) -> None:
    """Give `layer`, which is bitsandbytes' linear layer, a random weight, quantized at once or `later`."""
    std = getattr(model.config, "initializer_range", 0.02)  # type: ignore[union-attr]
    shape = (layer.out_features, layer.in_features)
    values = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std)
    layer.weight = _with_values(layer, values)
    if not later:
        layer.weight = layer.weight._quantize(device)
    if layer.bias is not None:
        layer.bias = nn.Parameter(torch.zeros(layer.out_features, dtype=dtype, device=device), False)


def quantize_linear(module: Any) -> None:
    """Quantize the weight of `module` on its device, if it is bitsandbytes' and is not quantized yet."""
    weight: Any = getattr(module, "weight", None)
    if not getattr(weight, "bnb_quantized", True):
        module.weight = _with_values(module, weight.data)._quantize(weight.device)


def _with_values(layer: Any, values: torch.Tensor) -> Any:
    """The weight of `layer`, bitsandbytes' own kind, with `values` that are not quantized yet."""
    return type(layer.weight)(values, **{**layer.weight.__dict__, "requires_grad": False, "module": layer})


def as_stored_bytes(recipe: Recipe, tensor: torch.Tensor) -> float:
    """Bytes of `tensor` as it will be stored: half a byte an element, without scales, for a weight of
    bitsandbytes that will be in 4 bit and is not quantized yet."""
    pending = not getattr(tensor, "bnb_quantized", True)
    return tensor.numel() * (0.5 if pending and recipe.four_bit else tensor.element_size())


def quantize_experts(recipe: Recipe, module: nn.Module) -> None:
    """Quantize the expert weights of `module` itself, if it has any. bitsandbytes can do it in 4 bit only."""
    options: Any = {"compress_statistics": recipe.double_quant, "quant_type": recipe.quantization}
    for name in quantized_experts(recipe, module):
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        replace_parameter_4bit(module, name, **options)


def quantized_experts(recipe: Recipe, module: nn.Module) -> list[str]:
    """Names of the parameters of `module` itself that `quantize_experts` quantizes."""
    if not recipe.four_bit:
        return []
    found = {name: getattr(module, name, None) for name in MIXTURE_PARAMETERS}
    return [name for name, weight in found.items() if isinstance(weight, nn.Parameter) and weight.dim() == 3]
