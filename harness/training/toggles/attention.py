"""The toggle `attention`: which implementation runs, what it needs, and which mask it takes."""

from collections.abc import Iterator
from typing import Any

import torch

from harness.errors import InputError, MissingDependency
from harness.parallel import DTYPES
from harness.recipe import Recipe
from harness.training.model_config import model_class
from harness.training.toggles import Problem

DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names that configs of transformers have for the rate at which attention weights are dropped."""


def attention_kernel(model: Any) -> str:
    """The attention implementation of a built model, by transformers' name for it."""
    return str(model.config._attn_implementation)


def attention_problems(recipe: Recipe, config: Any, device: torch.device) -> Iterator[Problem]:
    """The recipe's attention, where the model's class does not support it, or where it needs a GPU."""
    architecture = model_class(recipe, config)
    if recipe.attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        # transformers before 5.23 runs sdpa all the same, and does not cap the scores
        yield Problem(
            f"attention: sdpa: {config.model_type} caps its attention scores, which sdpa cannot",
            "attention: eager",
        )
    elif architecture is not None and not _has_attention(architecture, recipe.attention):
        yield Problem(
            f"attention: {recipe.attention}: {recipe.model} cannot run with it",
            f"attention: {_without_flash(architecture)}",
        )
    text = config.get_text_config()
    if recipe.flex and any(getattr(text, name, None) for name in DROPOUT):
        yield Problem(
            f"attention: flex_attention: {config.model_type} drops some of its attention weights, which "
            "flex_attention cannot",
            f"attention: {_without_flash(architecture)}",
        )
    if recipe.masks_by_position and device.type == "cpu":
        yield Problem(
            f"attention: {recipe.attention} needs an NVIDIA GPU", f"attention: {_without_flash(architecture)}"
        )


def require_flash_package(recipe: Recipe, device: torch.device) -> None:
    """Raise InputError if the recipe's flash attention package is not installed, unless only shapes run."""
    if not recipe.flash_package or device.type == "meta":
        return
    from transformers import utils

    # without this, transformers would fetch a kernel from the Hub
    version = recipe.attention[-1]
    if getattr(utils, f"is_flash_attn_{version}_available", lambda: False)():
        return
    if version == "2":
        raise MissingDependency("flash-attn", "flash-attn", f"attention: {recipe.attention}")
    folder = {"3": "hopper", "4": "flash_attn/cute"}[version]
    raise InputError(
        f"attention: {recipe.attention} needs the package flash-attn-{version}, which is not installed and "
        f"is no part of flash-attn. Build it from the folder {folder} of "
        "github.com/Dao-AILab/flash-attention, or set attention: sdpa."
    )


def additive_mask_dtype(recipe: Recipe) -> torch.dtype | None:
    """The dtype of the mask that `separate_densely` makes for eager attention: that of the embeddings, as in
    transformers. None for sdpa, which takes bools.
    """
    if recipe.attention != "eager":
        return None
    return torch.float32 if recipe.mixed or recipe.upcast_for_kbit else DTYPES[recipe.compute_dtype]


def _has_attention(architecture: Any, attention: str) -> bool:
    """Whether the model class `architecture` says that it supports `attention`."""
    if attention == "sdpa":
        return bool(getattr(architecture, "_supports_sdpa", True))
    if attention == "flex_attention":
        return bool(getattr(architecture, "_supports_flex_attn", False))
    # of a model whose attention has sinks: the packages that know them
    packages = getattr(architecture, "_compatible_flash_implementations", None) or (attention,)
    supports = bool(getattr(architecture, "_supports_flash_attn", True)) and attention in packages
    return attention == "eager" or supports


def _without_flash(architecture: Any) -> str:
    """The attention to suggest in place of flash attention."""
    return "sdpa" if architecture is None or _has_attention(architecture, "sdpa") else "eager"
