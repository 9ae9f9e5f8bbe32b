"""The toggle `loss: fused_linear`: Liger's loss, computed from the hidden states in chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from harness.errors import MissingDependency
from harness.recipe import Recipe
from harness.training.toggles import Problem


def fuse_loss(recipe: Recipe, model: Any) -> None:
    """Replace the model's forward by Liger's, which computes the loss from the hidden states in chunks."""
    if not recipe.fused_loss:
        return
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingDependency("liger-kernel", "liger", "loss: fused_linear") from None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    only_the_loss = {
        "rope": False,
        "rms_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
    }
    gate = "geglu" if base.config.model_type.startswith("gemma") else "swiglu"
    _apply_liger_kernel_to_instance(base, **only_the_loss, **{gate: False})


def fused_loss_problems(recipe: Recipe, config: Any, device: torch.device) -> Iterator[Problem]:
    if not recipe.fused_loss:
        return
    if not _liger_has(config.model_type):
        yield Problem(f"loss: fused_linear: Liger has no {config.model_type} model", "loss: standard")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        yield Problem("loss: fused_linear runs Liger's Triton kernels, which need a GPU", "loss: standard")


def _liger_has(model_type: str) -> bool:
    """Where Liger is not installed, that is said when it is asked for."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return True
    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN
