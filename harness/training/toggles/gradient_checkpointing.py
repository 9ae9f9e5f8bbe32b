"""The toggle `gradient_checkpointing`: each block keeps its input and computes the rest again."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from harness.recipe import Recipe
from harness.training.model_config import model_class
from harness.training.toggles import Problem

COSTLY = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
"""Products of matrices, grouped ones and fused attention among them: what is not computed again."""


def checkpoint_blocks(recipe: Recipe, model: Any) -> None:
    if not recipe.gradient_checkpointing:
        return
    # Non-reentrant: it stops recomputing early and needs no input that requires a gradient.
    how: dict[str, Any] = {"use_reentrant": False}
    if recipe.selective_checkpointing:
        kept = [getattr(torch.ops.aten, name).default for name in COSTLY]
        how["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.2x
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def checkpointing_problems(recipe: Recipe, config: Any) -> Iterator[Problem]:
    made_by = model_class(recipe, config)
    if recipe.gradient_checkpointing and made_by is not None and not made_by.supports_gradient_checkpointing:
        yield Problem(
            f"gradient_checkpointing: transformers has none for {config.model_type}",
            "gradient_checkpointing: false",
        )
