"""The sizes of a decoder, read from its config without torch: any family's, under whatever names it has them.

What a config.json leaves out is the family's default (architecture/family.py). Where configs are silent on
the layout of a block, a few rules below say how transformers lays out families of that kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from harness.architecture.config_file import LARGEST_COUNT, MOST_LAYERS, read_config
from harness.architecture.family import family_defaults
from harness.architecture.model_id import find_config
from harness.errors import InputError
from harness.system import is_object

Mixer = Literal[
    "attention",
    "sliding",
    "delta",
    "state space",
    "state space and attention",
    "scan",
    "conv",
    "recurrent",
    "none",
]
"""How a block mixes tokens. delta: linear attention with a state (gated delta rule, lightning attention);
state space: Mamba-2; scan: Mamba; conv: a short gated convolution; recurrent: RG-LRU."""
Feed = Literal["dense", "experts", "none"]

_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim", "dim_ff"),
    "hidden_act": ("hidden_activation", "activation_function", "mlp_hidden_act", "activation"),
    "max_position_embeddings": ("n_positions",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
    "layer_types": ("layers_block_type", "block_types"),
    "ssm_heads": ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"),
    "ssm_head_dim": ("mamba_d_head", "mamba_headdim", "mamba_head_dim"),
    "ssm_state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "ssm_groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "ssm_expand": ("mamba_expand", "expand"),
    "ssm_chunk": ("mamba_chunk_size", "chunk_size"),
    "conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_L_cache", "conv1d_width"),
    "attention_dropout": ("attn_pdrop", "attention_probs_dropout_prob"),
    "sliding_window": ("attention_window_size",),
    "final_logit_softcapping": ("logits_soft_cap",),
}
"""Other names of a field; a family's own `attribute_map` comes before them."""
_MIXERS: dict[str, Mixer] = {
    "full_attention": "attention",
    "attention": "attention",
    "global": "attention",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "local": "sliding",
    "linear_attention": "delta",
    "mamba": "state space",
    "hybrid": "state space",
    "conv": "conv",
    "recurrent": "recurrent",
}
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu")
_GATED = ("gemma", "zamba", "zamba2", "recurrent_gemma")
"""Families whose MLP has a gate though neither the plan of their layers nor the activation says so."""
_TWO_MORE_NORMS = ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "afmoe")
_ONE_NORM = ("cohere", "cohere2", "cohere2_moe", "gptj", "phi", "codegen", "mamba", "mamba2", "falcon_mamba")
_PARALLEL = ("cohere", "cohere2", "falcon", "gptj", "phi", "codegen", "gpt_neox")
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "openai-gpt", "biogpt", "xglm", "gpt-sw3")
_LINEAR_BIAS = ("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "phi", "opt", "bloom", "starcoder2", "gptj")
_PLAIN_ROOT = ("mamba", "mamba2", "falcon_mamba", "nemotron_h", "lfm2", "lfm2_moe", "zamba", "llama4_text")
"""Families with RMSNorm whose config names its epsilon otherwise than rms_norm_eps."""


@dataclass(frozen=True)
class Block:
    """A kind of decoder block, and how many there are."""

    mixer: Mixer
    feed: Feed
    count: int

    @property
    def attends(self) -> bool:
        """Whether it has attention over the sequence or a window of it."""
        return "attention" in self.mixer or self.mixer == "sliding"


@dataclass(frozen=True)
class ModelShape:
    """What decides a causal language model's memory and time. Sizes are counts of elements."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys; with latent attention, both of their parts."""
    intermediate: int
    tied: bool
    """The output head and the embedding are one weight."""
    activation: str = "silu"
    gated: bool = True
    """The MLP has three matrices: gate, up, down. Otherwise two."""
    dtype: str | None = None
    """The dtype the config declares: fp32, bf16 or fp16."""
    kinds: tuple[Block, ...] = ()
    """The kinds of block; empty: all alike, with attention."""
    value_dim: int = 0
    """Of a head's values; 0: head_dim."""
    query_rank: int = 0
    """Latent attention (arXiv 2405.04434): queries come from so many latents; 0: from the hidden states."""
    kv_rank: int = 0
    """Latents that keys and values come from; 0: there are none."""
    rope_dim: int = 0
    """Of a latent key, the dimensions that are rotated and shared by all heads."""
    positions: int = 0
    """Learned positions; 0 with rotary embeddings."""
    bias: bool = False
    """Linear layers have biases."""
    qkv_bias: bool = False
    layer_norm: bool = False
    """LayerNorm; otherwise RMSNorm."""
    norms: int = 2
    """Of a block."""
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """Of the MLP that all tokens take beside their experts."""
    sliding_window: int | None = None
    attention_softcap: bool = False
    logit_softcap: bool = False
    parallel_residual: bool = False
    """Attention and MLP read the same residual stream."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    state_heads: int = 0
    """Heads of a linear-attention or state-space layer."""
    state_head_dim: int = 0
    state_key_heads: int = 0
    """Key heads of linear attention; groups of a state space."""
    state_dim: int = 0
    """Of a key of linear attention; of a state space's state."""
    conv_kernel: int = 0
    gated_attention: bool = False
    """Queries bring a gate for attention's output."""
    chunk: int = 0
    """Tokens that a state-space layer works on at a time."""

    @property
    def state_width(self) -> int:
        """The width of a linear-attention or state-space layer."""
        return self.state_heads * self.state_head_dim

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The kinds of block, with their counts."""
        return self.kinds or (Block("attention", "experts" if self.experts else "dense", self.layers),)


def load_shape(model: str) -> ModelShape:
    """The shape of `model`: a name in recipes/models, a config.json, a checkpoint folder, or a Hugging Face
    id (architecture/model_id.py).

    Raises InputError for a model that cannot be found or read, or whose config gives no sizes.
    """
    path = find_config(model)
    return read_shape(read_config(path), str(path))


def read_shape(config: Mapping[str, Any], origin: str = "config") -> ModelShape:
    """The shape a config describes. Raises InputError naming `origin`, the field and its value."""
    inner = config.get("text_config")  # of a model that also sees or hears: its decoder
    if is_object(inner):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner}
    family = config.get("model_type")
    if not isinstance(family, str):
        raise InputError(
            f"model: {origin}: model_type is {family!r:.60}; it must name the model's family, for example llama."
        )
    return _shape(family, _Reader(family, config, origin))


class _Reader:
    """Typed access to a config's values, under transformers' names or others, with the family's defaults."""

    def __init__(self, family: str, config: Mapping[str, Any], origin: str) -> None:
        self.given, self.defaults, self.origin = config, family_defaults(family), origin
        self.other_names: Mapping[str, str] = self.defaults.get("attribute_map", {})
        self.plan = " ".join(self.defaults.get("base_model_tp_plan") or ())

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field. One that is null has no window, no cap: not the default."""
        own = self.other_names.get(name)
        names = [name, *([own] if own else []), *_NAMES.get(name, ())]
        for values in (self.given, self.defaults):
            for each in names:
                if each in values and (values[each] is not None or values is self.given):
                    return values[each] if values[each] is not None else default
        return default

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_COUNT
    ) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and value:  # one for each layer: their mean
            value = sum(n for n in cast("list[Any]", value) if isinstance(n, int)) // len(
                cast("list[Any]", value)
            )
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(
                f"model: {self.origin}: {name} is {value!r:.60}; it must be a whole number of at least {least} "
                f"and at most {most:,}."
            )
        return value

    def rate(self, name: str) -> float:
        value = self.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"model: {self.origin}: {name} is {value!r:.60}; it must be in [0, 1).")
        return float(value)


def _shape(family: str, read: _Reader) -> ModelShape:
    hidden = read.count("hidden_size")
    layers = read.count("num_hidden_layers", most=MOST_LAYERS)
    kinds = _kinds(family, read, layers)
    attends = any(block.attends for block in kinds)
    heads = read.count("num_attention_heads", None if attends else 1)
    kv_heads = 1 if read.get("multi_query") and family in ("falcon", "gpt_bigcode") else 0
    kv_heads = kv_heads or read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"model: {read.origin}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}."
        )
    rope, latents = read.count("qk_rope_head_dim", 0, least=0), read.count("kv_lora_rank", 0, least=0)
    if latents:
        head_dim = read.count("qk_nope_head_dim") + rope
    elif attends and hidden % heads and read.get("head_dim") is None:
        raise InputError(
            f"model: {read.origin}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}."
        )
    else:
        head_dim = read.count("head_dim", max(1, hidden // heads))
    experts = read.count("num_experts", 0, least=0) if any(b.feed == "experts" for b in kinds) else 0
    inner = read.count("intermediate_size", 4 * hidden) // (2 if family == "recurrent_gemma" else 1)
    width = read.count("moe_intermediate_size", inner)
    shared = read.count("n_shared_experts", 0, least=0) * width
    shared = shared or read.count("shared_expert_intermediate_size", 0, least=0)
    shared = shared or read.count("shared_intermediate_size", 0, least=0)
    activation = str(read.get("hidden_act", "gelu"))
    plan_says = "gate_proj" in read.plan or "gate_up_proj" in read.plan
    window = read.get("sliding_window")
    if family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and not read.get("use_sliding_window"):
        window = None
    return ModelShape(
        family=family,
        vocab=read.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=inner,
        tied=bool(read.get("tie_word_embeddings", True)),
        activation=activation,
        gated=plan_says
        or family in _GATED
        or (activation in _GATED_ACTIVATIONS and "up_proj" not in read.plan),
        dtype=_dtype(read),
        kinds=kinds,
        value_dim=read.count("v_head_dim", 0, least=0) if latents else 0,
        query_rank=read.count("q_lora_rank", 0, least=0) if latents else 0,
        kv_rank=latents,
        rope_dim=rope if latents else 0,
        positions=read.count("max_position_embeddings") if family in _LEARNED_POSITIONS else 0,
        bias=family in _LINEAR_BIAS,
        qkv_bias=family.startswith("qwen2") or bool(read.get("attention_bias")),
        layer_norm=family not in _PLAIN_ROOT and read.get("rms_norm_eps") is None,
        norms=4 if family in _TWO_MORE_NORMS else 1 if family in _ONE_NORM else 2,
        qk_norm="q_norm" in read.plan
        or "q_layernorm" in read.plan
        or family.startswith("olmo")
        or bool(read.get("use_qk_norm")),
        experts=experts,
        experts_per_token=read.count("num_experts_per_tok", 1) if experts else 0,
        expert_width=width if experts else 0,
        shared_width=shared,
        sliding_window=read.count("sliding_window") if window is not None else None,
        attention_softcap=read.get("attn_logit_softcapping") is not None,
        logit_softcap=read.get("final_logit_softcapping") is not None,
        parallel_residual=family in _PARALLEL and bool(read.get("use_parallel_residual", True)),
        attention_dropout=read.rate("attention_dropout"),
        residual_dropout=read.rate("resid_pdrop") or read.rate("hidden_dropout"),
        **_state(read, hidden, heads, head_dim),
    )


def _kinds(family: str, read: _Reader, layers: int) -> tuple[Block, ...]:
    """How many blocks there are of each kind."""
    named: Any = read.get("layer_types")
    mixers = (
        [*cast("list[Any]", named)]
        if isinstance(named, list | tuple) and named
        else _unnamed(family, read, layers)
    )
    mixers = (mixers * layers)[:layers]  # RecurrentGemma repeats three
    dense = read.count("first_k_dense_replace", 0, least=0)
    every, offset = read.get("expert_layer_period"), read.get("expert_layer_offset") or 0
    mixture = isinstance(read.get("num_experts"), int) and read.get("num_experts") > 0
    found: Counter[tuple[Mixer, Feed]] = Counter()
    for index, name in enumerate(mixers):
        routed = mixture and index >= dense and (not isinstance(every, int) or index % every == offset)
        feed: Feed = "experts" if routed else "dense"
        mixer = _MIXERS.get(str(name), "attention")
        if name in ("mlp", "moe"):  # Nemotron-H: a block is one or the other
            mixer, feed = "none", "experts" if name == "moe" else "dense"
        elif family == "nemotron_h":
            feed = "none"
        if mixer in ("delta", "state space"):
            mixer = _state_mixer(family, read)
            feed = "none" if family in ("mamba", "mamba2", "falcon_mamba", "zamba2", "zamba") else feed
        if mixer == "sliding" and read.get("sliding_window") is None:
            mixer = "attention"
        found[mixer, feed] += 1
    return tuple(Block(mixer, feed, count) for (mixer, feed), count in found.items())


def _state_mixer(family: str, read: _Reader) -> Mixer:
    """Configs call every layer that keeps a state `linear_attention`; its fields tell which it is."""
    if read.get("linear_num_key_heads") is not None or family in ("minimax", "kimi_linear"):
        return "delta"
    if family == "falcon_h1":
        return "state space and attention"
    return (
        "scan"
        if read.get("time_step_rank", read.get("mamba_dt_rank")) and family != "mamba2"
        else "state space"
    )


def _unnamed(family: str, read: _Reader, layers: int) -> list[str]:
    """The kinds of layers where the config lists none, as transformers' configuration classes have it."""
    attends = read.get("full_attn_idxs", read.get("attn_layer_indices"))
    if isinstance(attends, list):
        other = "conv" if family.startswith("lfm") else "mamba"
        return ["attention" if i in cast("list[Any]", attends) else other for i in range(layers)]
    if family in (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "falcon_h1",
        "zamba",
        "zamba2",
        "granitemoehybrid",
        "bamba",
    ):
        return ["mamba"] * layers
    if isinstance(period := read.get("attn_layer_period"), int):
        return [
            "attention" if i % period == read.get("attn_layer_offset") else "mamba" for i in range(layers)
        ]
    if read.get("linear_num_key_heads") is not None or family == "minimax":
        full = read.get("full_attention_interval", 2 if family == "minimax" else 4)
        return ["linear_attention" if (i + 1) % full else "attention" for i in range(layers)]
    if read.get("sliding_window") is None:
        return ["attention"] * layers
    if family.startswith("qwen"):
        first = read.count("max_window_layers", layers) if read.get("use_sliding_window") else layers
        return ["attention" if i < first else "sliding_attention" for i in range(layers)]
    every = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4}.get(
        family, 0
    )
    every = read.get("sliding_window_pattern", every)
    if not isinstance(every, int):
        every = 4
    return ["sliding_attention" if not every or (i + 1) % every else "attention" for i in range(layers)]


def _state(read: _Reader, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Sizes of linear-attention and state-space layers, as far as the config gives them."""
    if read.get("linear_num_key_heads") is not None:
        return {
            "state_heads": read.count("linear_num_value_heads"),
            "state_head_dim": read.count("linear_value_head_dim"),
            "state_key_heads": read.count("linear_num_key_heads"),
            "state_dim": read.count("linear_key_head_dim"),
            "conv_kernel": read.count("conv_kernel", 4),
            "gated_attention": True,
            "chunk": 64,
        }
    inner = read.count("mamba_d_ssm", 0, least=0) or read.count("lru_width", 0, least=0)
    inner = inner or read.count("ssm_expand", 1) * hidden
    own = read.get("ssm_heads", read.get("num_heads"))
    count = own if isinstance(own, int) and own > 0 else heads
    return {
        "state_heads": count,
        "state_head_dim": max(1, inner // count),
        "state_key_heads": read.count("ssm_groups", 1),
        "state_dim": read.count("ssm_state", head_dim),
        "conv_kernel": read.count("conv_kernel", 4),
        "chunk": read.count("ssm_chunk", 256),
    }


def _dtype(read: _Reader) -> str | None:
    declared = read.get("dtype", read.get("torch_dtype"))
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(declared))
