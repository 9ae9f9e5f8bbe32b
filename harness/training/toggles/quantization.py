"""bitsandbytes weights: which layers, and how random ones are made with one layer at a time in 16 bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import needed
from harness.parallel import DTYPES
from harness.recipe import Recipe


def prepare_for_kbit(recipe: Recipe, model: Any) -> None:
    """peft's: every 16-bit weight left becomes fp32."""
    if not recipe.upcast_for_kbit:
        return
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


MIXTURE_PARAMETERS = ("gate_up_proj", "down_proj")
"""Expert weights, one 3-dimensional parameter for all experts of a layer: not nn.Linear, so
transformers leaves them in 16 bit. Here they are quantized too, as a QLoRA of a mixture means."""


def quantized_on_loading(recipe: Recipe) -> dict[str, Any]:
    """What transformers' from_pretrained is told."""
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
        # FSDP divides tensors of floats: packed bytes are called so, in the dtype it would gather them in
        bnb_4bit_quant_storage=DTYPES[recipe.compute_dtype] if recipe.fsdp else torch.uint8,
    )


def build_random(
    recipe: Recipe, build: Callable[[], nn.Module], device: torch.device, *, later: bool = False
) -> nn.Module:
    """The model that `build` makes, with random weights; quantized layer by layer: at most one is in 16 bit
    at a time. If `later`, none is quantized yet: `quantize_linear` is called when each has its weights.

    The same layers are quantized as when transformers loads a checkpoint: every linear layer but the output
    head (and what is tied to it). `build` is called under the meta device then.
    """
    if not recipe.quantized:
        with device:
            return build()
    with needed("bitsandbytes", None, f"quantization: {recipe.quantization}"):
        import bitsandbytes as bnb
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    # Shapes without memory: nobody who counts bytes may see them, even if all else is shapes too (simulate).
    with _disable_current_modes():
        with torch.device("meta"):
            model = build()
        replace_with_bnb_linear(model, get_keys_to_not_convert(model), _bitsandbytes_config(recipe))
    dtype = next(model.parameters()).dtype
    for module in list(model.modules()):  # not those that quantizing experts adds: they would be emptied
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            _make_linear(model, module, dtype, device, later)
        elif _empty(module, device):
            model._init_weights(module)  # type: ignore[operator]
            if not later:
                quantize_experts(recipe, module)
    model.tie_weights()  # type: ignore[operator]
    flag = "is_loaded_in_8bit" if recipe.quantization == "int8" else "is_loaded_in_4bit"
    setattr(model, flag, True)  # what peft asks before it chooses its quantized layers
    # what flash attention asks when a norm has made its queries fp32: a weight's dtype would be uint8
    model.config._is_quantized = True  # type: ignore[union-attr]
    return model


def _empty(module: nn.Module, device: torch.device) -> bool:
    """Give what `module` itself holds memory on `device`, tied weights too. Whether it holds any."""
    weights, buffers = module._parameters.items(), module._buffers.items()
    for held in (weights, buffers):
        for name, shape in [(name, tensor) for name, tensor in held if tensor is not None]:
            new = torch.empty(shape.shape, dtype=shape.dtype, device=device)
            if held is weights:
                module._parameters[name] = nn.Parameter(new, shape.requires_grad)
            else:
                module._buffers[name] = new
    return any(tensor is not None for held in (weights, buffers) for _, tensor in held)


def _make_linear(model: nn.Module, layer: Any, dtype: torch.dtype, device: torch.device, later: bool) -> None:
    """Random weight in `dtype` for `layer` (a bitsandbytes linear layer), quantized at once or `later`."""
    std = getattr(model.config, "initializer_range", 0.02)  # type: ignore[union-attr]
    shape = (layer.out_features, layer.in_features)
    values = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std)
    layer.weight = _with_values(layer, values)
    if not later:
        layer.weight = layer.weight._quantize(device)
    if layer.bias is not None:
        layer.bias = nn.Parameter(torch.zeros(layer.out_features, dtype=dtype, device=device), False)


def quantize_linear(module: Any) -> None:
    """Quantize the weight of `module` where it lies, if it is a 4-bit one that was left for later."""
    weight: Any = getattr(module, "weight", None)
    if not getattr(weight, "bnb_quantized", True):
        module.weight = _with_values(module, weight.data)._quantize(weight.device)


def _with_values(layer: Any, values: torch.Tensor) -> Any:
    """The weight of `layer`, bitsandbytes' own kind, with `values` that are not quantized yet."""
    return type(layer.weight)(values, **{**layer.weight.__dict__, "requires_grad": False, "module": layer})


def as_stored_bytes(recipe: Recipe, tensor: torch.Tensor) -> float:
    """Of a weight that may be a 4-bit one left for later, without its scales; or of any tensor."""
    left = not getattr(tensor, "bnb_quantized", True)
    return tensor.numel() * (0.5 if left and recipe.four_bit else tensor.element_size())


def quantize_experts(recipe: Recipe, module: nn.Module) -> None:
    """Quantize the expert weights that `module` itself holds, if any. bitsandbytes does it in 4 bit only."""
    how: Any = {"compress_statistics": recipe.double_quant, "quant_type": recipe.quantization}
    for name in quantized_experts(recipe, module):
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        replace_parameter_4bit(module, name, **how)


def quantized_experts(recipe: Recipe, module: nn.Module) -> list[str]:
    """Names of the parameters of `module` itself that `quantize_experts` quantizes."""
    if recipe.quantization not in ("nf4", "fp4"):
        return []
    found = {name: getattr(module, name, None) for name in MIXTURE_PARAMETERS}
    return [name for name, held in found.items() if isinstance(held, nn.Parameter) and held.dim() == 3]
