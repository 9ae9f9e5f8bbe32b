"""The toggle `attention`: which implementation runs, what it needs, and the mask it takes."""

from collections.abc import Iterator
from typing import Any

import torch

from harness.errors import InputError, MissingDependency
from harness.parallel import DTYPES
from harness.recipe import Recipe
from harness.training.model_config import model_class
from harness.training.toggles import Problem


def attention_kernel(model: Any) -> str:
    """The attention implementation the built model uses, as transformers names it."""
    return str(model.config._attn_implementation)


def attention_problems(recipe: Recipe, config: Any, device: torch.device) -> Iterator[Problem]:
    """What the model's class says that it cannot do, and a CPU."""
    made_by = model_class(recipe, config)
    if recipe.attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        # transformers before 5.23 runs it all the same, and leaves the capping out
        yield Problem(
            f"attention: sdpa: {config.model_type} caps its attention scores, which sdpa cannot",
            "attention: eager",
        )
    elif made_by is not None and not _has_attention(made_by, recipe.attention):
        yield Problem(
            f"attention: {recipe.attention}: {recipe.model} cannot run with it",
            f"attention: {_without_flash(made_by)}",
        )
    if recipe.flash_package and device.type == "cpu":
        yield Problem(
            f"attention: {recipe.attention} needs an NVIDIA GPU", f"attention: {_without_flash(made_by)}"
        )


def require_flash_package(recipe: Recipe, device: torch.device) -> None:
    """Raise InputError if the kernels of flash attention are not installed where they would run."""
    if not recipe.flash_package or device.type == "meta":
        return
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    # without this, transformers would fetch a kernel from the Hub
    if recipe.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise MissingDependency("flash-attn", "flash-attn", f"attention: {recipe.attention}")
    if recipe.attention == "flash_attention_3" and not is_flash_attn_3_available():
        raise InputError(
            f"attention: {recipe.attention} needs the package flash-attn-3, which is not installed and is no "
            "part of flash-attn. Build it from the folder hopper of github.com/Dao-AILab/flash-attention, or "
            "set attention: sdpa."
        )


def additive_mask_dtype(recipe: Recipe) -> torch.dtype | None:
    """Of `separate_densely`'s mask: None for sdpa, which takes bools. transformers makes eager's in the dtype
    of the embeddings, so does this.
    """
    if recipe.attention != "eager":
        return None
    return torch.float32 if recipe.mixed or recipe.upcast_for_kbit else DTYPES[recipe.compute_dtype]


def _has_attention(made_by: Any, attention: str) -> bool:
    if attention == "sdpa":
        return bool(getattr(made_by, "_supports_sdpa", True))
    return attention == "eager" or bool(getattr(made_by, "_supports_flash_attn", True))


def _without_flash(made_by: Any) -> str:
    return "sdpa" if made_by is None or _has_attention(made_by, "sdpa") else "eager"
