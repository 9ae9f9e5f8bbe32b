"""The sizes of a decoder of any family, read from its config without torch, under whatever names it has.

What a config.json leaves out is the family's default (architecture/family.py). No config says how a block is
laid out: a few lists of families below say it, after transformers' models.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from harness.architecture.config_file import LARGEST_COUNT, MOST_LAYERS, checked_count, read_config
from harness.architecture.family import family_defaults
from harness.architecture.field_names import NAMES
from harness.architecture.model_id import find_config
from harness.architecture.tower import tower_elements
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
"""How a block mixes tokens. sliding: attention over a window; delta: linear attention with a state (gated
delta rule, lightning attention); state space: Mamba-2; scan: Mamba; conv: a short gated convolution;
recurrent: RG-LRU."""
Feed = Literal["dense", "experts", "none"]
"""How a block feeds forward: through one MLP, through some of several, or not at all."""

_MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "sliding"),
    **dict.fromkeys(("linear_attention", "mamba", "hybrid"), "state space"),
    **{"conv": "conv", "recurrent": "recurrent", "mlp": "none", "moe": "none"},
}
"""By a config's name of a layer. Every other name means full attention."""
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""By a letter of Nemotron-H's hybrid_override_pattern: the name of the layer."""
_MAMBA = ("mamba", "mamba2", "falcon_mamba", "zamba", "zamba2")
_GATED = ("gemma", "recurrent_gemma", "zamba", "zamba2", "lfm2", "lfm2_moe")
"""Families whose MLP has a gate, though neither base_model_tp_plan nor the activation says so."""
# families whose blocks have other than two norms, or with parallel residuals, learned positions, biases
_FOUR_NORMS = ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "afmoe")
_ONE_NORM = ("cohere", "cohere2", "cohere2_moe", "gptj", "phi", "codegen", *_MAMBA)
_PARALLEL = ("cohere", "cohere2", "falcon", "gptj", "phi", "codegen", "gpt_neox")
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "openai-gpt", "biogpt", "xglm", "gpt-sw3")
_BIASED = ("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "phi", "opt", "bloom", "starcoder2", "gptj")
_RMS = ("nemotron_h", "lfm2", "lfm2_moe", "llama4_text", *_MAMBA)
"""Families with RMSNorm whose config has another name than rms_norm_eps for its epsilon."""
_EVERY_EXPERT = {"llama4_text": "num_experts"}
"""The field with the experts that compute a token, where it is not num_experts_per_tok: Llama4TextMoe gives
every token to every expert, and multiplies most results by 0."""
_QK_NORM = ("olmo", "qwen3", "lfm2")
"""How names of families begin that normalize queries and keys, whatever base_model_tp_plan says."""
_SLIDING_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4}
"""One of so many layers has full attention, the others a window. In families not listed, all have it."""


@dataclass(frozen=True)
class Block:
    """A kind of decoder block, and how many blocks of a model are of this kind."""

    mixer: Mixer
    feed: Feed
    count: int

    @property
    def attends(self) -> bool:
        """Whether it has attention, over the sequence or over a window of it."""
        return "attention" in self.mixer or self.mixer == "sliding"


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide a causal language model's memory and time, in elements."""

    family: str
    """The config's `model_type`."""
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """The size of a head's queries and keys; with latent attention, of both of their parts together."""
    intermediate: int
    tied: bool
    """Whether the output head and the embedding are one weight."""
    activation: str = "silu"
    gated: bool = True
    """Whether the MLP has three matrices (gate, up, down) or two."""
    dtype: str | None = None
    """The dtype that the config declares: fp32, bf16 or fp16; None for another or none."""
    kinds: tuple[Block, ...] = ()
    """The kinds of block; empty where all are alike and have attention."""
    value_dim: int = 0
    """The size of a head's values; 0: head_dim."""
    query_rank: int = 0
    """Latent attention (arXiv 2405.04434): the size of the vector that queries are made of; 0: they are made
    of the hidden states."""
    kv_rank: int = 0
    """The size of the vector that keys and values are made of; 0 without latent attention."""
    rope_dim: int = 0
    """The dimensions of a latent key that are rotated and shared by all heads."""
    positions: int = 0
    """The number of learned positions; 0 with rotary embeddings."""
    bias: bool = False
    """Whether linear layers have biases."""
    qkv_bias: bool = False
    layer_norm: bool = False
    """Whether norms are LayerNorm instead of RMSNorm."""
    norms: int = 2
    """The number of norms in a block with a mixer and an MLP."""
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    """The inner width of an expert."""
    shared_width: int = 0
    """The inner width of the MLP that every token takes in addition to its experts; 0 without one."""
    gates_shared: bool = False
    """Whether a linear layer with one output weights the result of that MLP."""
    sliding_window: int | None = None
    """Tokens that a block with a window attends to; None where no block has one."""
    attention_softcap: bool = False
    logit_softcap: bool = False
    parallel_residual: bool = False
    """Whether attention and MLP read the same residual stream."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    state_heads: int = 0
    """Heads of a linear-attention or state-space layer."""
    state_head_dim: int = 0
    """The size of such a head's values."""
    state_key_heads: int = 0
    """Key heads of linear attention, or groups of a state space."""
    state_dim: int = 0
    """The size of a key of linear attention, or of a state space's state."""
    conv_kernel: int = 0
    """The width, in tokens, of such a layer's convolution."""
    gated_attention: bool = False
    """Whether the matrix of queries also makes a gate for attention's output."""
    chunk: int = 0
    """Tokens that a linear-attention or state-space layer computes at a time."""
    tower: int = 0
    """Weights of the image tower and its projector together."""

    @property
    def state_width(self) -> int:
        """The width of a linear-attention or state-space layer."""
        return self.state_heads * self.state_head_dim

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The kinds of block, with their counts."""
        return self.kinds or (Block("attention", "experts" if self.experts else "dense", self.layers),)


def load_shape(model: str) -> ModelShape:
    """The shape of `model`, which model_id.py finds: a name in recipes/models, a path, or a Hugging Face id.

    Raises InputError for a model that cannot be found or read, or whose config lacks sizes.
    """
    path = find_config(model)
    return read_shape(read_config(path), str(path))


def read_shape(config: Mapping[str, Any], origin: str = "config") -> ModelShape:
    """The shape that a config describes. Raises InputError naming `origin`, the field and its value."""
    whole, inner = config, config.get("text_config")  # the decoder of a model with other modalities too
    if is_object(inner):
        # of the whole model's family, if its config leaves it out, and else of the decoder's
        default = family_defaults(str(config.get("model_type"))).get("tie_word_embeddings")
        tied = config.get("tie_word_embeddings", default)
        config = {**({} if tied is None else {"tie_word_embeddings": tied}), **inner}
    family = config.get("model_type")
    if not isinstance(family, str):
        needed = "it must name the model's family, for example llama."
        raise InputError(f"model: {origin}: model_type is {family!r:.60}; {needed}")
    shape = _shape(family, _Reader(family, config, origin))
    return replace(shape, tower=tower_elements(whole, shape.hidden))


class _Reader:
    """Reads a config's values, whatever names the family has for them, with the family's defaults."""

    def __init__(self, family: str, config: Mapping[str, Any], origin: str) -> None:
        self.family, self.given, self.origin = family, config, origin
        self.defaults = family_defaults(family)
        self.other_names: Mapping[str, str] = self.defaults.get("attribute_map", {})
        self.plan = " ".join(self.defaults.get("base_model_tp_plan") or ())

    def names(self, name: str) -> list[str]:
        own = self.other_names.get(name)
        return [name, *([own] if own else []), *NAMES.get(name, ())]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field. One that the config sets to null (no window, no cap) has `default`, and not
        the family's default."""
        for values in (self.given, self.defaults):
            found = [values[each] for each in self.names(name) if each in values]
            if found and (found[0] is not None or values is self.given):
                return default if found[0] is None else found[0]
        return default

    def has(self, name: str) -> bool:
        """Whether the family has the field. A family that transformers does not have counts as having all."""
        return not self.defaults or any(each in self.defaults for each in self.names(name))

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST_COUNT) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and value:  # one for each layer: their mean
            numbers = [n for n in cast("list[Any]", value) if isinstance(n, int)]
            value = sum(numbers) // max(1, len(numbers))
        return checked_count(self.origin, name, value, least, most)

    def size(self, name: str) -> int:
        """A count that may be missing, and is 0 then."""
        return self.count(name, 0, least=0)

    def rate(self, name: str) -> float:
        value = self.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"model: {self.origin}: {name} is {value!r:.60}; it must be in [0, 1).")
        return float(value)


def _shape(family: str, read: _Reader) -> ModelShape:
    hidden, pattern = read.count("hidden_size"), str(read.get("hybrid_override_pattern", ""))  # as in M-M*-
    layers = read.count("num_hidden_layers", len(pattern) or None, most=MOST_LAYERS)
    kinds = _kinds(read, layers, [_LETTERS.get(letter, "") for letter in pattern])
    attends, routes = any(b.attends for b in kinds), any(b.feed == "experts" for b in kinds)
    heads = read.count("num_attention_heads", None if attends else 1)
    kv_heads = read.count("num_key_value_heads", heads) if read.has("num_key_value_heads") else heads
    kv_heads = 1 if read.get("multi_query") and family in ("falcon", "gpt_bigcode") else kv_heads
    latents, rope = read.size("kv_lora_rank"), read.size("qk_rope_head_dim")
    if heads % kv_heads:
        what = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        raise InputError(f"model: {read.origin}: {what}.")
    inner = _mlp_width(read, hidden)
    width = read.count("moe_intermediate_size", inner)
    shared = inner if family == "llama4_text" else read.size("shared_expert_intermediate_size")
    act = "silu" if family.startswith("lfm") else "gelu"
    activation, window = str(read.get("hidden_act", act)), read.get("sliding_window")
    gated = activation in ("silu", "swish", "swiglu") and "up_proj" not in read.plan
    gated = gated or family in _GATED or "gate_proj" in read.plan or "gate_up_proj" in read.plan
    biased = family.startswith("qwen2") or bool(read.get("attention_bias"))
    declared = str(read.get("dtype", read.get("torch_dtype")))
    return ModelShape(
        family=family,
        vocab=read.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.count("qk_nope_head_dim") + rope
        if latents
        else read.count("head_dim", max(1, hidden // heads)),
        intermediate=inner,
        tied=bool(read.get("tie_word_embeddings", True)),
        activation=activation,
        gated=gated,
        dtype={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(declared),
        kinds=kinds,
        value_dim=read.count("v_head_dim", max(1, hidden // heads)) if latents else 0,
        query_rank=read.size("q_lora_rank") if latents else 0,
        kv_rank=latents,
        rope_dim=rope,
        positions=read.count("max_position_embeddings") if family in _LEARNED_POSITIONS else 0,
        bias=family in _BIASED,
        qkv_bias=biased,
        layer_norm=family not in _RMS and read.get("rms_norm_eps") is None,
        norms=4 if family in _FOUR_NORMS else 1 if family in _ONE_NORM else 2,
        qk_norm=family.startswith(_QK_NORM) or any(each in read.plan for each in ("q_norm", "q_layernorm")),
        experts=read.count("num_experts") if routes else 0,
        experts_per_token=read.count(_EVERY_EXPERT.get(family, "num_experts_per_tok"), 1) if routes else 0,
        expert_width=width if routes else 0,
        shared_width=shared or read.size("n_shared_experts") * width,
        gates_shared=routes and bool(shared) and family.startswith("qwen"),
        sliding_window=window if any(b.mixer == "sliding" for b in kinds) else None,
        attention_softcap=read.get("attn_logit_softcapping") is not None,
        logit_softcap=read.get("final_logit_softcapping") is not None,
        parallel_residual=family in _PARALLEL and bool(read.get("use_parallel_residual", True)),
        attention_dropout=read.rate("attention_dropout"),
        residual_dropout=read.rate("resid_pdrop"),
        **_state(read, hidden, heads),
    )


def _mlp_width(read: _Reader, hidden: int) -> int:
    inner = read.count("intermediate_size", 4 * hidden)
    if read.family == "recurrent_gemma":
        return inner // 2
    if read.family == "lfm2" and read.get("block_auto_adjust_ff_dim"):  # as Lfm2MLP has it
        inner = int(read.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        step = read.count("block_multiple_of", 256)
        return -(-inner // step) * step
    return inner


def _kinds(read: _Reader, layers: int, pattern: list[str]) -> tuple[Block, ...]:
    """The kinds of block that the model has, with their counts. `pattern`: names of the layers, if
    Nemotron-H's config has them."""
    named: Any = pattern or read.get("layer_types")
    names = (
        [*cast("list[Any]", named)] if isinstance(named, list | tuple) and named else _unnamed(read, layers)
    )
    names = (names * layers)[:layers]  # RecurrentGemma lists three, which repeat
    dense = read.size("first_k_dense_replace")
    mixture = read.size("num_experts") > 0 and read.get("is_moe", True)
    every, offset = read.count("expert_layer_period", 1), read.size("expert_layer_offset")
    found: Counter[tuple[Mixer, Feed]] = Counter()
    for index, name in enumerate(map(str, names)):
        routed = mixture and index >= dense and index % every == offset
        feed: Feed = "experts" if routed else "dense"
        mixer: Mixer = _MIXERS.get(name, "attention")
        if mixer == "state space":
            mixer, feed = _state_mixer(read), "none" if read.family in _MAMBA else feed
        if mixer == "sliding" and not isinstance(read.get("sliding_window"), int):
            mixer = "attention"
        if read.family == "nemotron_h":  # a block mixes tokens or feeds forward, and never both
            feed = "none" if mixer != "none" else "experts" if name == "moe" else "dense"
        found[mixer, feed] += 1
    return tuple(Block(mixer, feed, count) for (mixer, feed), count in found.items())


def _state_mixer(read: _Reader) -> Mixer:
    """The mixer of a layer that keeps a state: configs call each `linear_attention`, and other fields say
    which one it is."""
    if read.get("linear_num_key_heads") is not None or read.family in ("minimax", "kimi_linear"):
        return "delta"
    if read.family == "falcon_h1":
        return "state space and attention"
    scans = read.get("time_step_rank", read.get("mamba_dt_rank")) is not None and read.family != "mamba2"
    return "scan" if scans else "state space"


def _unnamed(read: _Reader, layers: int) -> list[str]:
    """Names of the layers where the config lists none, by transformers' configuration classes."""
    attends, period, family = read.get("full_attn_idxs"), read.size("attn_layer_period"), read.family
    window = isinstance(read.get("sliding_window"), int)
    if isinstance(attends, list):
        other = "conv" if family.startswith("lfm") else "mamba"
        return ["attention" if i in cast("list[Any]", attends) else other for i in range(layers)]
    if period:
        offset = read.size("attn_layer_offset")
        return ["attention" if i % period == offset else "mamba" for i in range(layers)]
    if family in (*_MAMBA, "falcon_h1", "granitemoehybrid", "bamba"):
        return ["mamba"] * layers
    if read.get("linear_num_key_heads") is not None or family == "minimax":
        full = read.count("full_attention_interval", 2 if family == "minimax" else 4)
        return ["linear_attention" if (i + 1) % full else "attention" for i in range(layers)]
    if family.startswith("qwen"):
        first = read.count("max_window_layers", layers) if read.get("use_sliding_window") else layers
        return ["attention" if i < first else "sliding_attention" for i in range(layers)]
    every = read.get("sliding_window_pattern", _SLIDING_EVERY.get(family, layers + 1))
    every = every if isinstance(every, int) and every > 0 else 4
    return ["sliding_attention" if window and (i + 1) % every else "attention" for i in range(layers)]


def _state(read: _Reader, hidden: int, heads: int) -> dict[str, Any]:
    """The fields of ModelShape that are about linear-attention and state-space layers."""
    kernel = read.count("conv_kernel", 4)
    if read.get("linear_num_key_heads") is not None:
        return {
            "state_heads": read.count("linear_num_value_heads"),
            "state_head_dim": read.count("linear_value_head_dim"),
            "state_key_heads": read.count("linear_num_key_heads"),
            "state_dim": read.count("linear_key_head_dim"),
            "conv_kernel": kernel,
            "gated_attention": True,
            "chunk": 64,
        }
    own, width = read.get("state_heads", read.get("num_heads")), read.get("state_head_dim")
    count = own if isinstance(own, int) and own > 0 else heads
    inner = count * width if isinstance(width, int) else read.count("expand", 1) * hidden  # or "auto"
    inner = read.size("mamba_d_ssm") or read.size("lru_width") or inner
    return {
        "state_heads": count,
        "state_head_dim": max(1, inner // count),
        "state_key_heads": read.count("state_groups", 1),
        "state_dim": read.count("state_size", max(1, hidden // heads)),
        "conv_kernel": kernel,
        "chunk": read.count("chunk_size", 256),
    }
