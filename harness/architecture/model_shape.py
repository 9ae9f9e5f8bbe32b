"""The sizes of a model, read from its config without torch or transformers.

A config.json leaves out what equals transformers' default for its family: architecture/families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from harness.architecture.config_file import LARGEST_COUNT, MOST_LAYERS, read_config
from harness.architecture.families import FAMILIES
from harness.architecture.model_id import find_config
from harness.errors import InputError
from harness.system import is_object

_ALIASES = {  # GPT-2's names
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
    "max_position_embeddings": "n_positions",
}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",  # one fused kernel, like the exact one
    "gelu_new": "gelu_new",  # written out in Python
}


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
    intermediate: int
    tied: bool
    """The output head and the embedding are one weight."""
    activation: Literal["silu", "gelu", "gelu_new"]
    dtype: str | None = None
    """The dtype the config declares: fp32, bf16 or fp16."""
    positions: int = 0
    """Learned positions; 0 with rotary embeddings."""
    rotary_dim: int = 0
    """Dimensions of a head that are rotated."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    head_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    sliding_window: int | None = None
    sliding_layers: int = 0
    """Layers whose attention sees only the window."""
    attention_softcap: bool = False
    logit_softcap: bool = False
    parallel_residual: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0


def load_shape(model: str) -> ModelShape:
    """The shape of `model`: a name in recipes/models, a config.json, a checkpoint folder, or a Hugging Face
    id (architecture/model_id.py).

    Raises InputError for a model that cannot be found or read, or whose family is not known.
    """
    path = find_config(model)
    return read_shape(read_config(path), str(path))


def read_shape(config: Mapping[str, Any], origin: str = "config") -> ModelShape:
    """The shape a config describes. Raises InputError naming `origin`, the field and its value."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(
            f"model: {origin}: napkin has no arithmetic for model_type {family!r:.60}; it knows "
            f"{', '.join(sorted(FAMILIES))}. For any other causal language model ask `harness simulate`, "
            "`harness fit` or `harness hardware`, which simulate the step."
        )
    values = {**FAMILIES[family], **{name: value for name, value in config.items() if value is not None}}
    # null means "no window" and "no soft cap", not "the default"
    values |= {name: None for name in ("sliding_window",) if name in config and config[name] is None}
    values |= {name: None for name in _SOFTCAPS if name in config and config[name] is None}
    return _shape(family, _Reader(values, origin))


_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class _Reader:
    """Typed access to a config's values under transformers' names or GPT-2's."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, self.values.get(_ALIASES.get(name, name), default))

    def count(self, name: str, default: int | None = None, at_most: int = LARGEST_COUNT) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise InputError(
                f"model: {self.origin}: {name} is {value!r:.60}; it must be a whole number of at least 1 and "
                f"at most {at_most:,}."
            )
        return value

    def rate(self, *names: str) -> float:
        for name in names:
            value = self.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                    raise InputError(f"model: {self.origin}: {name} is {value!r:.60}; it must be in [0, 1).")
                return float(value)
        return 0.0


def _shape(family: str, read: _Reader) -> ModelShape:
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    layers = read.count("num_hidden_layers", at_most=MOST_LAYERS)
    if hidden % heads and read.get("head_dim") is None:
        raise InputError(
            f"model: {read.origin}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}."
        )
    kv_heads = heads if family in ("gpt2", "gpt_neox") else read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"model: {read.origin}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}."
        )
    head_dim = read.count("head_dim", hidden // heads)
    window, sliding_layers = _sliding(family, read, layers)
    biased = family not in ("mistral", "mixtral", "phi3") and bool(read.get("attention_bias"))
    if family == "phi" and read.get("qk_layernorm"):
        raise InputError(f"model: {read.origin}: napkin has no arithmetic for phi with qk_layernorm.")
    return ModelShape(
        family=family,
        vocab=read.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read.count("intermediate_size", 4 * hidden),
        tied=bool(read.get("tie_word_embeddings")),
        activation=_activation(family, read),
        dtype=_dtype(read),
        positions=read.count("n_positions") if family == "gpt2" else 0,
        rotary_dim=0 if family == "gpt2" else int(head_dim * _rotary_fraction(read)),
        qkv_bias=family in ("qwen2", "gpt2", "phi") or biased,
        out_bias=family in ("gpt2", "phi") or biased,
        mlp_bias=family in ("gpt2", "gpt_neox", "phi") or (family == "llama" and bool(read.get("mlp_bias"))),
        head_bias=family == "phi",
        experts=read.count("num_local_experts") if family == "mixtral" else 0,
        experts_per_token=read.count("num_experts_per_tok") if family == "mixtral" else 0,
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_softcap=read.get("attn_logit_softcapping") is not None,
        logit_softcap=read.get("final_logit_softcapping") is not None,
        parallel_residual=family == "phi"
        or (family == "gpt_neox" and bool(read.get("use_parallel_residual", True))),
        attention_dropout=read.rate("attention_dropout"),
        residual_dropout=read.rate("resid_pdrop", "hidden_dropout"),
        embedding_dropout=read.rate("embd_pdrop", "hidden_dropout"),
    )


def _sliding(family: str, read: _Reader, layers: int) -> tuple[int | None, int]:
    """The attention window and how many layers have it."""
    window = read.get("sliding_window")
    if window is None or family not in ("mistral", "mixtral", "qwen2", "qwen3", "gemma2", "phi3"):
        return None, 0
    window = read.count("sliding_window")
    kinds: Any = read.get("layer_types")
    if isinstance(kinds, list):
        return window, min(layers, cast("list[Any]", kinds).count("sliding_attention"))
    if family in ("qwen2", "qwen3"):
        sliding = layers - read.count("max_window_layers") if read.get("use_sliding_window") else 0
        return (window, sliding) if sliding > 0 else (None, 0)
    return window, (layers + 1) // 2 if family == "gemma2" else layers


def _activation(family: str, read: _Reader) -> Any:
    name = read.get("hidden_activation" if family == "gemma2" else "hidden_act")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        what = f"no arithmetic for the activation {name!r:.60}"
        raise InputError(f"model: {read.origin}: {what}; known: {known}.")
    return _ACTIVATIONS[name]


def _dtype(read: _Reader) -> str | None:
    declared = read.get("dtype", read.get("torch_dtype"))
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(declared))


def _rotary_fraction(read: _Reader) -> float:
    rope: Any = read.get("rope_parameters") or read.get("rope_scaling") or {}
    stated = rope.get("partial_rotary_factor") if is_object(rope) else None
    fraction: Any = stated or read.get("partial_rotary_factor", read.get("rotary_pct", 1.0))
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise InputError(
            f"model: {read.origin}: the fraction of a head that is rotated is {fraction!r:.60}; "
            "it must be above 0 and at most 1."
        )
    return float(fraction)
