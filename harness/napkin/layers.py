"""The weights of a decoder, by name and size, for every way of mixing tokens and of feeding forward.

Names are those of the modules inside a block, which is what a recipe's lora_targets match. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from harness.architecture import Block, ModelShape

Role = Literal["in", "out", "low", "up", "down", "router", "experts up", "experts down"]
"""What a matrix does. in: reads the hidden states for the mixer. low: a smaller vector from them (latents,
steps); out, down: back to the hidden states."""


class Matrix(NamedTuple):
    """A linear layer of `inputs` x `outputs` weights, or so many of them that are `stacked`."""

    name: str
    inputs: int
    outputs: int
    role: Role
    bias: bool = False
    stacked: int = 1
    """A mixture's experts, which are one parameter and no linear layer."""

    @property
    def elements(self) -> int:
        return self.inputs * self.outputs * self.stacked

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer, which quantization and LoRA look for."""
        return self.stacked == 1 and self.role != "router"


_PACKED = {
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt_bigcode": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    **dict.fromkeys(
        ("gpt_neox", "falcon", "bloom"),
        ("query_key_value", "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}
"""Families with one weight for queries, keys and values."""
_OUT = {"phi": "dense", "opt": "out_proj", "gptj": "out_proj", "gpt_neo": "out_proj"}
_UP_DOWN = {
    "phi": ("fc1", "fc2"),
    "opt": ("fc1", "fc2"),
    "gptj": ("fc_in", "fc_out"),
    "gpt_neo": ("c_fc", "c_proj"),
    "starcoder2": ("c_fc", "c_proj"),
}


def matrices_of(shape: ModelShape, block: Block) -> list[Matrix]:
    """The matrices of one block of this kind."""
    return [*_mixing(shape, block.mixer), *_feeding(shape, block.feed)]


def _mixing(shape: ModelShape, mixer: str) -> list[Matrix]:
    hidden = shape.hidden
    match mixer:
        case "attention" | "sliding":
            return _latent(shape) if shape.kv_rank else _attention(shape)
        case "ssm and attention":
            return [*_mixing(shape, "ssm"), *_attention(shape)]
        case "delta":
            keys, values = shape.state_key_heads * shape.state_dim, inner_of(shape)
            return [
                Matrix("linear_attn.in_proj_qkvz", hidden, 2 * keys + 2 * values, "in"),
                Matrix("linear_attn.in_proj_ba", hidden, 2 * shape.state_heads, "low"),
                Matrix("linear_attn.out_proj", values, hidden, "out"),
            ]
        case "ssm":
            inner, states = inner_of(shape), 2 * shape.state_key_heads * shape.state_dim
            return [
                Matrix("mamba.in_proj", hidden, 2 * inner + states + shape.state_heads, "in"),
                Matrix("mamba.out_proj", inner, hidden, "out"),
            ]
        case "scan":
            inner, step = inner_of(shape), -(-hidden // 16)
            return [
                Matrix("mixer.in_proj", hidden, 2 * inner, "in"),
                Matrix("mixer.x_proj", inner, step + 2 * shape.state_dim, "low"),
                Matrix("mixer.dt_proj", step, inner, "low"),
                Matrix("mixer.out_proj", inner, hidden, "out"),
            ]
        case "conv":
            return [Matrix("conv.in_proj", hidden, 3 * hidden, "in"), Matrix("conv.out_proj", hidden, hidden, "out")]
        case "recurrent":
            inner = inner_of(shape)
            gates = Matrix("rg_lru.gates", inner, 2 * inner // shape.heads, "router")
            ins = [Matrix(f"temporal_block.linear_{each}", hidden, inner, "in") for each in "xy"]
            return [*ins, gates, Matrix("temporal_block.linear_out", inner, hidden, "out")]
        case _:
            return []


def inner_of(shape: ModelShape) -> int:
    """The width of a linear-attention or state-space layer."""
    return shape.state_heads * shape.state_head_dim


def _attention(shape: ModelShape) -> list[Matrix]:
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    bias = shape.qkv_bias or shape.bias
    if shape.family in _PACKED:
        packed, out, *_ = _PACKED[shape.family]
        return [Matrix(packed, hidden, q + 2 * kv, "in", bias), Matrix(out, q, hidden, "out", shape.bias)]
    out = _OUT.get(shape.family, "o_proj")
    return [
        Matrix("self_attn.q_proj", hidden, q, "in", bias),
        Matrix("self_attn.k_proj", hidden, kv, "in", bias),
        Matrix("self_attn.v_proj", hidden, kv, "in", bias),
        Matrix(f"self_attn.{out}", q, hidden, "out", shape.bias),
    ]


def _latent(shape: ModelShape) -> list[Matrix]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    hidden, heads, q = shape.hidden, shape.heads, shape.heads * shape.head_dim
    made = heads * (shape.head_dim - shape.rope_dim + shape.value_dim)
    queries = [Matrix("self_attn.q_proj", hidden, q, "in")]
    if shape.query_rank:
        queries = [
            Matrix("self_attn.q_a_proj", hidden, shape.query_rank, "in"),
            Matrix("self_attn.q_b_proj", shape.query_rank, q, "low"),
        ]
    return [
        *queries,
        Matrix("self_attn.kv_a_proj_with_mqa", hidden, shape.kv_rank + shape.rope_dim, "in"),
        Matrix("self_attn.kv_b_proj", shape.kv_rank, made, "low"),
        Matrix("self_attn.o_proj", heads * shape.value_dim, hidden, "out"),
    ]


def _feeding(shape: ModelShape, feed: str) -> list[Matrix]:
    if feed == "none":
        return []
    if feed == "dense":
        return mlp(shape, "mlp", shape.intermediate)
    hidden, count, times = shape.hidden, shape.experts, 1 + shape.gated
    return [
        Matrix("mlp.gate", hidden, count, "router"),
        Matrix("mlp.experts.gate_up_proj", hidden, times * shape.expert_width, "experts up", stacked=count),
        Matrix("mlp.experts.down_proj", shape.expert_width, hidden, "experts down", stacked=count),
        *(mlp(shape, "mlp.shared_expert", shape.shared_width) if shape.shared_width else []),
    ]


def mlp(shape: ModelShape, name: str, width: int) -> list[Matrix]:
    """Gate, up and down (arXiv 2002.05202), or up and down."""
    hidden = shape.hidden
    up, down = _UP_DOWN.get(shape.family, ("up_proj", "down_proj"))
    if shape.family in _PACKED:
        up, down = (part.removeprefix("mlp.") for part in _PACKED[shape.family][2:])
        ups = [Matrix(f"{name}.{up}", hidden, width * (1 + shape.gated), "up", shape.bias)]
    else:
        ups = [Matrix(f"{name}.gate_proj", hidden, width, "up")] if shape.gated else []
        ups += [Matrix(f"{name}.{up}", hidden, width, "up", shape.bias)]
    return [*ups, Matrix(f"{name}.{down}", width, hidden, "down", shape.bias)]


def vectors_of(shape: ModelShape, block: Block) -> int:
    """Elements of one block's norms, convolutions and the like, which are never quantized nor adapted."""
    norms = shape.norms if block.feed != "none" and block.mixer != "none" else 1
    elements = norms * shape.hidden * (1 + shape.layer_norm)
    if block.mixer in ("attention", "sliding"):
        elements += shape.kv_rank + shape.query_rank + 2 * shape.head_dim * shape.qk_norm
    elif block.mixer != "none":
        width = shape.hidden if block.mixer == "conv" else inner_of(shape)
        keys = 2 * shape.state_key_heads * shape.state_dim if block.mixer != "scan" else 0
        elements += (width + keys) * shape.conv_kernel + 2 * shape.state_heads
        elements += width * shape.state_dim * (block.mixer == "scan")
    return elements


def matching(matrices: Sequence[Matrix], target: str) -> list[Matrix]:
    """peft's rule: a target is a module's name or the end of its path."""
    return [m for m in matrices if m.name == target or m.name.endswith(f".{target}")]
