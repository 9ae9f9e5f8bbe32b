"""The toggle `attention`: which implementation runs, and what it needs."""

from __future__ import annotations

from typing import Any

import torch

from harness.errors import InputError, MissingDependency
from harness.recipe import Recipe


def attention_kernel(model: Any) -> str:
    """The attention implementation the built model uses, as transformers names it."""
    return str(model.config._attn_implementation)


def refuse_what_cannot_run(recipe: Recipe, config: Any, device: torch.device) -> None:
    """Raise InputError for a toggle whose kernels `device` or this installation does not have."""
    if recipe.attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        # transformers before 5.23 runs it all the same, and leaves the capping out
        raise InputError(
            f"attention: sdpa: {config.model_type} caps its attention scores, which sdpa cannot; "
            "set attention: eager."
        )
    if device.type == "meta":  # nothing runs
        return
    on_gpu = device.type != "cpu"
    if recipe.attention.startswith("flash_attention"):
        if not on_gpu:
            raise InputError(f"attention: {recipe.attention} needs an NVIDIA GPU; set attention: sdpa.")
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        two = recipe.attention == "flash_attention_2"
        if not (is_flash_attn_2_available() if two else is_flash_attn_3_available()):
            # without this, transformers would fetch a kernel from the Hub
            raise MissingDependency(
                "flash-attn" if two else "flash-attn-3", "flash-attn", f"attention: {recipe.attention}"
            )
    if recipe.loss == "fused_linear" and not on_gpu and not _triton_interprets():
        raise InputError(
            "loss: fused_linear runs Liger's Triton kernels, which need a GPU; set loss: standard."
        )


def _triton_interprets() -> bool:
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"
