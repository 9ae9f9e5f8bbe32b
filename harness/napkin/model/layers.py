"""The weights of each architecture by name and size, as transformers lays them out.

Names are those of the modules inside one block, which is what a recipe's lora_targets match.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.architecture import ModelShape


class Matrix(NamedTuple):
    """A linear layer: `outputs` x `inputs` weights, and a bias of `outputs` or none."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    stacked: int = 0
    """How many of a mixture's experts are stacked in it; 0: it is no stack."""
    fused: int = 1
    """How many matrices stand side by side in each of those."""

    @property
    def parts(self) -> int:
        """Matrices it is made of, one an expert."""
        return max(1, self.stacked)

    @property
    def elements(self) -> int:
        return self.inputs * self.outputs


class Vector(NamedTuple):
    """A weight that is never quantized nor adapted: a norm's scale or shift, learned positions."""

    name: str
    elements: int


_PACKED_QKV = {
    "gpt2": ("attn.c_attn", "attn.c_proj"),
    "gpt_neox": ("attention.query_key_value", "attention.dense"),
}
_MLP = {
    "gpt2": ("mlp.c_fc", "mlp.c_proj"),
    "gpt_neox": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "phi": ("mlp.fc1", "mlp.fc2"),
}
LAYER_NORM_FAMILIES = ("gpt2", "gpt_neox", "phi")


def attention_matrices(shape: ModelShape) -> list[Matrix]:
    """The projections of one block's attention."""
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    if shape.family in _PACKED_QKV:
        packed, out = _PACKED_QKV[shape.family]
        return [Matrix(packed, hidden, q + 2 * kv, shape.qkv_bias), Matrix(out, q, hidden, shape.out_bias)]
    if shape.family == "phi3":
        return [Matrix("self_attn.qkv_proj", hidden, q + 2 * kv), Matrix("self_attn.o_proj", q, hidden)]
    out = "self_attn.dense" if shape.family == "phi" else "self_attn.o_proj"
    return [
        Matrix("self_attn.q_proj", hidden, q, shape.qkv_bias),
        Matrix("self_attn.k_proj", hidden, kv, shape.qkv_bias),
        Matrix("self_attn.v_proj", hidden, kv, shape.qkv_bias),
        Matrix(out, q, hidden, shape.out_bias),
    ]


def mlp_matrices(shape: ModelShape) -> list[Matrix]:
    """The projections of one block's MLP; none for a mixture of experts, which has `expert_matrices`."""
    hidden, inner, bias = shape.hidden, shape.intermediate, shape.mlp_bias
    if shape.experts:
        return []
    if shape.family in _MLP:
        up, down = _MLP[shape.family]
        return [Matrix(up, hidden, inner, bias), Matrix(down, inner, hidden, bias)]
    if shape.family == "phi3":
        return [Matrix("mlp.gate_up_proj", hidden, 2 * inner), Matrix("mlp.down_proj", inner, hidden)]
    return [
        Matrix("mlp.gate_proj", hidden, inner, bias),
        Matrix("mlp.up_proj", hidden, inner, bias),
        Matrix("mlp.down_proj", inner, hidden, bias),
    ]


def expert_matrices(shape: ModelShape) -> list[Matrix]:
    """All experts of one block, stacked: one parameter each, not linear layers (so LoRA passes them by)."""
    if not shape.experts:
        return []
    return [
        Matrix(
            "mlp.experts.gate_up_proj",
            shape.hidden,
            shape.experts * 2 * shape.intermediate,
            stacked=shape.experts,
            fused=2,
        ),
        Matrix(
            "mlp.experts.down_proj", shape.intermediate, shape.experts * shape.hidden, stacked=shape.experts
        ),
    ]


def router_matrix(shape: ModelShape) -> Matrix:
    """What scores a mixture's experts: a bare parameter, never quantized."""
    return Matrix("mlp.gate", shape.hidden, shape.experts)


def block_vectors(shape: ModelShape) -> list[Vector]:
    """One block's norms."""
    hidden = shape.hidden
    norms = {"gpt2": 2, "gpt_neox": 2, "phi": 1, "gemma2": 4}.get(shape.family, 2)
    vectors = [Vector(f"norm{i}", size) for i in range(1, norms + 1) for size in norm_sizes(shape, hidden)]
    if shape.family == "qwen3":
        vectors += [Vector("self_attn.q_norm", shape.head_dim), Vector("self_attn.k_norm", shape.head_dim)]
    return vectors


def norm_sizes(shape: ModelShape, size: int) -> list[int]:
    """Elements of a norm's weights: a scale, and for LayerNorm a shift."""
    return [size, size] if shape.family in LAYER_NORM_FAMILIES else [size]


def embedding_matrix(shape: ModelShape, words: int) -> Matrix:
    """Token embeddings: one row of `hidden` for each of `words`."""
    return Matrix("embed_tokens", shape.hidden, words)


def head_matrix(shape: ModelShape, words: int) -> Matrix:
    """The output head, of `words`. Tied models use the embeddings' weight for it."""
    return Matrix("lm_head", shape.hidden, words, shape.head_bias)


def outer_vectors(shape: ModelShape) -> list[Vector]:
    """The final norm."""
    return [Vector("norm", size) for size in norm_sizes(shape, shape.hidden)]
