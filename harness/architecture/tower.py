"""Counts the weights of an image tower and of its projector from a config, without torch."""

from collections.abc import Mapping
from typing import Any

from harness.architecture.family import family_defaults
from harness.system import is_object


def tower_elements(config: Mapping[str, Any], hidden: int) -> int:
    """How many weights are between an image's pixels and a decoder of width `hidden`: those of a ViT (arXiv
    2010.11929) and of a projector. 0 for a config without a tower, and for a tower of another kind.

    A tower with gated MLPs has RMSNorm and no learned positions, as in Qwen2.5-VL (arXiv 2502.13923, section
    2.1.1). Any other has LayerNorm and a learned position for each patch of an image of its original size.
    """
    vision = config.get("vision_config")
    if not is_object(vision):
        return 0
    tower = {**family_defaults(str(vision.get("model_type"))), **vision}
    width, depth, inner = (
        _first(tower, *names)
        for names in (("embed_dim", "hidden_size"), ("depth", "num_hidden_layers"), ("intermediate_size",))
    )
    inner = inner or width * _first(tower, "mlp_ratio")
    patch, merged = _first(tower, "patch_size"), _first(tower, "spatial_merge_size")
    if not (width and depth and inner and patch):
        return 0
    gated = tower.get("hidden_act") == "silu"
    norm = width * (1 if gated else 2)
    values = (_first(tower, "in_channels", "num_channels") or 3) * patch**2  # of one patch
    values *= _first(tower, "temporal_patch_size") or 1
    positions = _first(tower, "num_position_embeddings")  # Qwen3-VL, whose patches have a bias too
    bias = 0 if merged and not positions else width
    positions = positions or (0 if merged else (_first(tower, "image_size") // patch) ** 2)
    attention = 4 * width * (width + 1)
    mlp = (2 + gated) * width * inner + (1 + gated) * inner + width
    blocks = depth * (attention + mlp + 2 * norm)
    deep = len(tower.get("deepstack_visual_indexes") or ())  # layers that have a projector with a norm each
    projectors = (1 + deep) * _projector(config, width, merged, hidden) + deep * 2 * width * merged**2
    return values * width + bias + positions * width + blocks + norm + projectors


def _projector(config: Mapping[str, Any], width: int, merged: int, hidden: int) -> int:
    """How many weights a projector has, from a tower of `width` to a decoder of width `hidden`.

    Gemma 3's is one matrix behind a norm. Others have two matrices with biases: LLaVA's come after each
    patch, and a merger's after `merged` x `merged` patches in one.
    """
    if "mm_tokens_per_image" in config:
        return width * hidden + width
    inner = width * merged**2 if merged else hidden
    inputs = inner if merged else width
    return inputs * inner + inner + inner * hidden + hidden


def _first(values: Mapping[str, Any], *names: str) -> int:
    """The value of the first of these fields that is a whole number; 0 without one."""
    found = (values.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool)), 0)
