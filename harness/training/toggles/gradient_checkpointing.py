"""The toggle `gradient_checkpointing`: each block keeps its input, and backward computes the rest again."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from harness.recipe import Recipe
from harness.training.host_memory import to_host
from harness.training.model_config import model_class
from harness.training.toggles import Problem

COSTLY = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
"""Operators whose results selective checkpointing keeps: matrix products and fused attention."""


def checkpoint_blocks(recipe: Recipe, model: Any) -> None:
    if not recipe.gradient_checkpointing:
        return
    # non-reentrant checkpointing stops recomputing early and needs no input that requires a gradient
    options: dict[str, Any] = {"use_reentrant": False}
    if recipe.selective_checkpointing:
        operators = [getattr(torch.ops.aten, name).default for name in COSTLY]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, operators)
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.2x
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for module in model.modules() if recipe.checkpoints_on_host else ():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _inputs_to_host(module._gradient_checkpointing_func)


def _inputs_to_host(checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpointed` with the inputs that it keeps in host memory. Both copies are on the compute stream, as
    with transformers' own `offload` (5.23), which a simulation cannot take: its tensors are on no GPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _back):
            return checkpointed(*args, **kwargs)

    return run


def _to_host(tensor: Tensor) -> tuple[Tensor, torch.device]:
    return to_host(tensor), tensor.device


def _back(kept: tuple[Tensor, torch.device]) -> Tensor:
    host, device = kept
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


def checkpointing_problems(recipe: Recipe, config: Any) -> Iterator[Problem]:
    known = model_class(recipe, config)
    if recipe.gradient_checkpointing and known is not None and not known.supports_gradient_checkpointing:
        yield Problem(
            f"gradient_checkpointing: transformers has none for {config.model_type}",
            "gradient_checkpointing: false",
        )
