"""A small config of any type of model: the type's own default config, its sizes made small by their names.

Layers are chosen, not cut: one of each kind that the default config has. Sizes keep what kernels ask of them
(heads of 64, widths that are multiples of 8), so that a small model runs what a large one runs.
"""

from typing import Any

VOCABULARY = 1024
LAYERS = 2
_SIZES = """
1024: vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size
1024: unpadded_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base decoder_vocab_size
384: intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff d_inner
384: moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
384: intermediate_size_mlp dense_intermediate_size expert_ffn_hidden_size shared_intermediate_size
384: feed_forward_size shared_experts_intermediate_size mlp_dim projector_hidden_act_dim
256: hidden_size d_model n_embd emb_dim embedding_dim lru_width hidden_size_global
256: word_embed_proj_dim mamba_d_ssm moe_latent_size embedding_size attention_hidden_size
256: output_embedding_size input_embedding_size projection_dim ple_embed_dim router_hidden_size
256: vision_output_dim projector_input_dim
64: head_dim qk_head_dim v_head_dim kv_channels dim_head attention_head_dim linear_head_dim
64: swa_head_dim mamba_d_head linear_key_head_dim linear_value_head_dim global_head_dim
64: index_head_dim mamba_head_dim d_head sliding_window window_size sliding_window_size
64: attention_window_size local_attention mamba_headdim attention_chunk_size q_lora_rank
64: mamba_chunk_size attention_head_size index_topk
32: qk_rope_head_dim qk_nope_head_dim kv_lora_rank o_lora_rank mamba_dt_rank time_step_rank
32: hidden_size_per_layer_input adapter_rank rotary_dim
16: mamba_d_state ssm_state_size
8: mamba_n_heads n_mamba_heads mamba_num_heads
4: num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
4: attention_heads swa_num_attention_heads linear_num_heads index_n_heads
4: num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads num_experts
4: n_routed_experts num_local_experts moe_num_experts zero_expert_num num_attention_heads_per_layer
2: num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups linear_num_key_heads
2: n_group num_expert_group num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts
2: num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers
2: num_decoder_layers depth num_layers_per_stack num_blocks n_groups o_groups
1: topk_group first_k_dense_replace num_nextn_predict_layers num_dense_layers
"""
SIZES = {
    name: int(size)
    for size, names in (line.split(":") for line in _SIZES.strip().splitlines())
    for name in names.split()
}
"""The size of a field, by its name, where the default is larger."""
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KINDS = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "attention_layers")
"""Lists that have the kind of each layer."""
_ONE_EACH = (
    ("num_key_value_heads", "num_attention_heads"),
    ("swa_num_key_value_heads", "swa_num_attention_heads"),
    ("head_dim", "qk_rope_head_dim"),
)
"""Sizes that stay equal to others, where the default config has them so."""
_LAYERS_OF_ZAMBA = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_TWICE_AS_WIDE = {"attention_hidden_size": 512, "attention_head_dim": 128}
OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 64, "head_dim": 32},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [64, 192]},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"qk_head_dim": 64, "head_dim": 32},
    "zamba": {
        "layers_block_type": _LAYERS_OF_ZAMBA,
        "num_hidden_layers": len(_LAYERS_OF_ZAMBA),
        **_TWICE_AS_WIDE,
    },
    "zamba2": {
        "layers_block_type": _LAYERS_OF_ZAMBA,
        "num_hidden_layers": len(_LAYERS_OF_ZAMBA),
        "hybrid_layer_ids": [1, 3],
        **_TWICE_AS_WIDE,
    },
}
"""By type: what the default config lacks, or what its sizes ask of each other."""


LORA_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_mamba", "mamba"), ("in_proj", "x_proj")),
    **dict.fromkeys(("falcon_h1", "nemotron_h"), ("in_proj", "q_proj", "v_proj", "up_proj")),
    **dict.fromkeys(("llama4", "llama4_text", "phimoe"), ("q_proj", "k_proj", "v_proj", "o_proj")),
    "deepseek_v4": ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"),
    "mamba2": ("in_proj",),
}
"""By type: layers to adapt, where peft refuses or fails with `all-linear`."""


def small_config(config: Any) -> dict[str, Any]:
    """`config`, a type's own default, made small: values for a `config.json`."""
    kind = config.model_type
    return {**_shrunk(config.to_dict()), **OVERRIDES.get(kind, {}), "model_type": kind}


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    layers = _chosen_layers(values)
    made = {name: _small(name, value, layers, _layer_count(values)) for name, value in values.items()}
    apart = {int(index): entry for index, entry in (values.get("per_layer_config") or {}).items()}
    if apart:
        kept = {str(place): apart[index] for place, index in enumerate(layers) if index in apart}
        made["per_layer_config"] = {place: _shrunk(entry) for place, entry in kept.items()}
    for kept, heads in _ONE_EACH:
        if values.get(kept) is not None and values.get(kept) == values.get(heads):
            made[kept] = made[heads]
    if made.get("is_decoder") is False:  # an encoder's class, told to look back only
        made["is_decoder"] = True
    if made.get("head_dim", 0) is None:
        made["head_dim"] = SIZES["head_dim"]
    return made | {name: len(layers) for name in COUNTS if name in made and layers}


def _small(name: str, value: Any, layers: list[int], count: int) -> Any:
    if isinstance(value, dict) and "model_type" in value:
        return _shrunk(value)
    if isinstance(value, list) and len(value) == count and count > len(layers):
        return [_small(name, value[index], layers, 0) for index in layers]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("token_id", "token_index")):
        return value % VOCABULARY
    return min(value, SIZES[name]) if name in SIZES else value


def _layer_count(values: dict[str, Any]) -> int:
    return next((values[name] for name in COUNTS if isinstance(values.get(name), int)), 0)


def _chosen_layers(values: dict[str, Any]) -> list[int]:
    """The first layer of each kind, and at least two."""
    count = _layer_count(values)
    kinds = [values[name] for name in KINDS if isinstance(values.get(name), list)]
    kinds = [each for each in kinds if len(each) == count]
    apart = {int(index) for index in values.get("per_layer_config") or {}}
    first: dict[Any, int] = {}
    for index in range(count):
        first.setdefault((index in apart, *(str(each[index]) for each in kinds)), index)
    chosen = set(first.values())
    for index in range(count):
        if len(chosen) < LAYERS:
            chosen.add(index)
    return sorted(chosen)
