"""The toggles `loss: fused_linear`, `kernels: liger` and `mlp_tiles`: Liger's loss, which is computed from
the hidden states in chunks, Liger's kernels, and its MLP, which computes a part of the sequence at a time."""

import inspect
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import InputError, needed
from harness.parallel import without_adapter
from harness.recipe import Recipe
from harness.training.toggles import Problem

ROTATES = "apply_rotary_pos_emb"
"""The function of a family's module that Liger replaces for all its models. Here only one model gets it."""


def fuse_loss(recipe: Recipe, model: Any) -> None:
    """With `loss: fused_linear`, replace the model's forward by Liger's; with `kernels: liger`, its norms,
    activations and rotations."""
    if not (recipe.fused_loss or recipe.by_liger):
        return
    with needed("liger-kernel", "liger", "loss: fused_linear" if recipe.fused_loss else "kernels: liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    # Liger logs which kernels it lacks, and a handler that keeps the record would keep the call's tensors
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    base = without_adapter(model)
    gate = "geglu" if base.config.model_type.startswith("gemma") else "swiglu"
    kernels = dict.fromkeys(("rope", "rms_norm", gate), recipe.by_liger)
    code = sys.modules[type(base).__module__]
    before = dict(vars(code))
    _apply_liger_kernel_to_instance(
        base, cross_entropy=False, fused_linear_cross_entropy=recipe.fused_loss, **kernels
    )
    changed = {name: value for name, value in vars(code).items() if before.get(name) is not value}
    vars(code).update({name: before[name] for name in changed})  # other models' code stays as it was
    for module in base.modules() if ROTATES in changed else ():
        forward = inspect.unwrap(type(module).forward)
        if ROTATES in forward.__code__.co_names and forward.__globals__ is vars(code):
            own = {**forward.__globals__, ROTATES: changed[ROTATES]}
            module.forward = MethodType(_with_globals(forward, own), module)


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """A copy of `function` with `names` as its global names."""
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def fused_loss_problems(recipe: Recipe, config: Any, device: torch.device) -> Iterator[Problem]:
    lines = {"loss: fused_linear": "loss: standard"} if recipe.fused_loss else {}
    lines |= {"kernels: liger": "kernels: standard"} if recipe.by_liger else {}
    for line, instead in lines.items():
        if not _liger_has(config.model_type):
            yield Problem(f"{line}: Liger has no {config.model_type} model", instead)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            yield Problem(f"{line} runs Liger's Triton kernels, which need a GPU", instead)


def _liger_has(model_type: str) -> bool:
    """Whether Liger knows the model. True where Liger is not installed: importing it will raise that."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return True
    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def tile_mlps(recipe: Recipe, model: Any) -> None:
    """With `mlp_tiles`, run the MLP of every block by Liger's tiled MLP, which keeps its input alone. Its two
    passes must make the same numbers, so that nothing may be dropped. Raises InputError for a model that has
    no such MLP."""
    if recipe.mlp_tiles == 1:
        return
    with needed("liger-kernel", "liger", f"mlp_tiles: {recipe.mlp_tiles}"):
        from liger_kernel.ops import apply_tiled_mlp
    mlps = [m for name, m in without_adapter(model).named_modules() if _is_mlp(name, m)]
    dropping = any(isinstance(m, nn.Dropout) and m.p > 0 for mlp in mlps for m in mlp.modules())
    if not mlps or dropping:
        why = "drops values in its MLPs" if dropping else "has no MLP for all tokens in its blocks"
        raise InputError(f"mlp_tiles: {recipe.mlp_tiles}: {recipe.model} {why}; set mlp_tiles: 1.")
    for mlp in mlps:
        mlp.forward = partial(_tiled, apply_tiled_mlp, mlp, mlp.forward, recipe.mlp_tiles)


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Whether `module` is the MLP of a block, as transformers names both."""
    return name.endswith(".mlp") and type(module).__name__.endswith("MLP")


def _tiled(apply: Any, mlp: nn.Module, forward: Any, tiles: int, states: Tensor) -> Any:
    trained = [each for each in mlp.parameters() if each.requires_grad]
    return apply(lambda _, part: forward(part), mlp, states, tiles, trained)
