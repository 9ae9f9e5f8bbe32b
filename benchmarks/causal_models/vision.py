"""Small models that see, and the ways to train them: the rows of profiles/cpu/vision_models.json."""

from typing import Any

IMAGES = {"images": 2, "image_size": [112, 168], "micro_batch_size": 2, "seq_len": 256}
VISION_METHODS: dict[str, dict[str, Any]] = {
    "images": IMAGES,
    "images lora": {**IMAGES, "adapter": "lora", "gradient_checkpointing": True},
    "images and tower": {**IMAGES, "train_vision": True},
    "text alone": {},
}
"""Full fine-tuning with the tower frozen; LoRA on the decoder, with checkpointing; all; and no image."""

TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 256, "hidden_size": 256},
    "qwen2_5_vl": {"out_hidden_size": 256, "fullatt_block_indexes": [1]},
    **{kind: {"out_hidden_size": 256} for kind in ("qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")},
    **{
        kind: {"out_hidden_size": 256, "deepstack_visual_indexes": [0]}
        for kind in ("qwen3_vl", "qwen3_vl_moe")
    },
    **{kind: {"image_size": 112, "patch_size": 14} for kind in ("gemma3", "llava", "vipllava")},
    "llava_next": {"image_size": 112, "patch_size": 28},
    "internvl": {"image_size": [56, 56], "patch_size": [14, 14]},
    "llama4": {
        **{"image_size": 56, "patch_size": 14, "intermediate_size": 4 * 256},
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 256),
    },
}
"""By type: what sizes of the tower ask of each other, and of the decoder's."""
AROUND: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 16},
    "llava_next": {"image_grid_pinpoints": [[112, 224], [224, 112], [224, 224]]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
}


def with_small_tower(config: dict[str, Any]) -> dict[str, Any]:
    """A small config (tiny.py), with a tower whose sizes fit."""
    kind = config["model_type"]
    if not isinstance(config.get("vision_config"), dict):
        return config
    tower = {**config["vision_config"], **TOWERS.get(kind, {})}
    rotation = {"mrope_section": [8, 12, 12], "rope_type": "default", "rope_theta": 1e6}
    if kind == "glm4v_moe":
        rotation |= {"mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}
    if kind in ("qwen2_vl", "qwen2_5_vl", "glm4v_moe"):  # parts of half of what is rotated
        config = {**config, "text_config": {**config["text_config"], "rope_parameters": rotation}}
    return {**config, **AROUND.get(kind, {}), "vision_config": tower}
