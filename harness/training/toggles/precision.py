"""The toggles `precision` and `fp8`: the weights' dtype, autocast, fp16's scaler, and products in fp8."""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import InputError, needed
from harness.parallel import DTYPES
from harness.recipe import Recipe
from harness.training.toggles.optimizer_state import state_shapes


def weights_dtype(recipe: Recipe, config: Any) -> torch.dtype:
    """The dtype of the model's own weights: that of a plain precision. Under autocast fp32; but a frozen base
    keeps the dtype that its config declares.
    """
    if not recipe.mixed:
        return DTYPES[recipe.precision]
    declared = getattr(config, "dtype", None) if not recipe.trains_base else None
    if isinstance(declared, str):
        declared = getattr(torch, declared)
    return declared or torch.float32


def as_loaded(model: Any) -> Any:
    """`model`, which was just built, as from_pretrained would have made it. All tensors move to the device of
    the embeddings, since torch.normal and torch.FloatTensor ignore the device of a context; and weights that
    the class keeps in fp32 become fp32.
    """
    device = model.get_input_embeddings().weight.device
    if any(tensor.device.type != device.type for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
    fp32_names = model._get_dtype_plan(model.dtype)
    if fp32_names:
        pattern = re.compile("|".join(name.replace("*", ".*") for name in fp32_names))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if pattern.search(name) and tensor.is_floating_point():
                tensor.data = tensor.data.float()
    return model


def autocast(recipe: Recipe, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if not recipe.mixed or recipe.fsdp:  # FSDP gathers weights in the compute dtype, without autocast
        return nullcontext
    return partial(torch.autocast, device.type, dtype=DTYPES[recipe.compute_dtype])


def forget_casts() -> None:
    """Drop autocast's casts before another forward pass of a step. accelerate enters autocast again for each
    pass, and gradient checkpointing makes its casts itself."""
    torch.clear_autocast_cache()


def multiply_in_fp8(recipe: Recipe, model: Any, device: torch.device) -> None:
    """Make torchao's Float8Linear of every linear layer but the output head, in place, if its sizes are
    multiples of 16, which fp8 units require. A CPU has none, and multiplies the rounded factors in fp32."""
    if not recipe.fp8:
        return
    with needed("torchao", "torchao", "fp8: true"):
        from torchao import float8  # pyright: ignore[reportMissingImports]
    head = model.get_output_embeddings()
    layers = {
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer.in_features % 16 == layer.out_features % 16 == 0
    } - {head}
    if not layers:
        raise InputError(
            f"fp8: true: {recipe.model} has no torch.nn.Linear of sizes that are multiples of 16, besides "
            "its head; set fp8: false."
        )
    # padding, as in accelerate, allows any number of rows
    options = float8.Float8LinearConfig(pad_inner_dim=True, emulate=device.type == "cpu")
    with _disable_current_modes():  # it makes layers on the meta device, whose bytes no observer may count
        float8.convert_to_float8_training(
            model, config=options, module_filter_fn=lambda layer, _: layer in layers
        )


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, also for fp16 weights.

    torch refuses to unscale fp16 gradients, because small ones become 0. Training with fp16 weights and no
    master copy cannot avoid that, and the recipe says so.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` of a scaler with the same settings returned. Raises ValueError for
        anything else, which torch would accept until the next step."""
        own = self.state_dict()
        expected = own | {name: state_dict.get(name) for name in ("scale", "_growth_tracker")}
        if state_dict != expected or state_shapes(state_dict) != state_shapes(own):
            raise ValueError("the saved scaler has other settings")
        if not (0 < state_dict["scale"] < math.inf and 0 <= state_dict["_growth_tracker"] < 2**31):
            raise ValueError("the saved scaler has a scale or a count that is impossible")
        super().load_state_dict(state_dict)


def build_scaler(recipe: Recipe, device: torch.device) -> GradScaler | None:
    """GradScaler for fp16 and fp16-mixed, else None."""
    return GradScaler(device.type) if recipe.scaled else None
