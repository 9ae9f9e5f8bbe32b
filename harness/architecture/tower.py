"""The weights of an image tower and of its projector, counted from a config without torch."""

from collections.abc import Mapping
from typing import Any

from harness.architecture.family import family_defaults
from harness.system import is_object


def tower_elements(config: Mapping[str, Any], hidden: int) -> int:
    """Elements of all weights between an image's pixels and a decoder of width `hidden`: a ViT (arXiv
    2010.11929) and a projector. 0 for a config without a tower, or with one of another kind.

    Gated MLPs, RMSNorm and no learned positions go together here, as in Qwen2.5-VL (arXiv 2502.13923, section
    2.1.1); the others have LayerNorm and a learned position for each patch of the size they were made for.
    """
    vision = config.get("vision_config")
    if not is_object(vision):
        return 0
    given = {**family_defaults(str(vision.get("model_type"))), **vision}
    width, depth, inner = (
        _first(given, *names)
        for names in (("embed_dim", "hidden_size"), ("depth", "num_hidden_layers"), ("intermediate_size",))
    )
    inner = inner or width * _first(given, "mlp_ratio")
    patch, merged = _first(given, "patch_size"), _first(given, "spatial_merge_size")
    if not (width and depth and inner and patch):
        return 0
    gated, norm = given.get("hidden_act") == "silu", width * (1 if given.get("hidden_act") == "silu" else 2)
    values = (_first(given, "in_channels", "num_channels") or 3) * patch**2
    values *= _first(given, "temporal_patch_size") or 1
    learned = _first(given, "num_position_embeddings")  # Qwen3-VL's, with a bias of the patches
    biased = 0 if merged and not learned else width
    learned = learned or (0 if merged else (_first(given, "image_size") // patch) ** 2)
    attention = 4 * width * (width + 1)
    mlp = (2 + gated) * width * inner + (1 + gated) * inner + width
    blocks = depth * (attention + mlp + 2 * norm)
    deep = len(given.get("deepstack_visual_indexes") or ())  # layers with a projector and its norm each
    projectors = (1 + deep) * _projector(config, width, merged, hidden) + deep * 2 * width * merged**2
    return values * width + biased + learned * width + blocks + norm + projectors


def _projector(config: Mapping[str, Any], width: int, merged: int, hidden: int) -> int:
    """Gemma 3 has one matrix behind a norm, which a merger's two have counted with the tower; LLaVA two."""
    if "mm_tokens_per_image" in config:
        return width * hidden + width
    inner = width * merged**2 if merged else hidden
    before = inner if merged else width
    return before * inner + inner + inner * hidden + hidden


def _first(values: Mapping[str, Any], *names: str) -> int:
    found = (values.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool)), 0)
