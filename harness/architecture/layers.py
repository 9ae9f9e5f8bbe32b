"""The weight matrices of a decoder, by name and size, for every kind of token mixer and feed-forward layer.

Names are those of the modules inside a block, which a recipe's lora_targets match.
"""

from typing import Literal, NamedTuple

from harness.architecture.model_shape import Block, ModelShape

Role = Literal["in", "low", "out", "up", "down", "router", "expert up", "expert down", "vector"]
"""What a matrix is for. in: from the hidden states into the mixer; low: from a smaller vector; out: from the
mixer back to the hidden states; up and down: into the MLP and back. A vector is no matrix."""
_PACKED = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("attn.c_attn", "attn.c_proj", "c_fc", "c_proj")),
    **dict.fromkeys(
        ("gpt_neox", "falcon", "bloom"), ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
    ),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "gate_up_proj", "down_proj"),
}
"""Families with one matrix for queries, keys and values. By family: its name, and those of attention's output
matrix and of the MLP's two."""
_OWN = {
    "phi": ("dense", "fc1", "fc2"),
    "opt": ("out_proj", "fc1", "fc2"),
    "gptj": ("out_proj", "fc_in", "fc_out"),
    "gpt_neo": ("out_proj", "c_fc", "c_proj"),
    "starcoder2": ("o_proj", "c_fc", "c_proj"),
}
"""Families with other names for attention's output matrix and for the MLP's two."""
TOWER = "image tower"
"""The name under which the weights of the image tower and its projector are counted together."""
_STATES = {"delta": "linear_attn", "state space": "mamba", "conv": "conv", "recurrent": "temporal_block"}
"""Names of the modules that mix tokens by a state, by the mixer."""


class Matrix(NamedTuple):
    """A weight of `inputs` x `outputs` elements, or `stacked` such weights in one parameter."""

    name: str
    inputs: int
    outputs: int
    role: Role
    bias: bool = False
    stacked: int = 1
    """For a mixture's experts, how many: they are one parameter, and no linear layers."""

    @property
    def elements(self) -> int:
        """How many elements the weight has, without its bias."""
        return self.inputs * self.outputs * self.stacked

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer: quantization and LoRA look for those."""
        return self.stacked == 1 and self.role not in ("router", "vector")


def matrices_of(shape: ModelShape, block: Block) -> list[Matrix]:
    """The matrices of one block of the kind `block`."""
    mixers = block.mixer.split(" and ")
    return [*(m for mixer in mixers for m in _mixing(shape, mixer)), *_feeding(shape, block.feed)]


def _mixing(shape: ModelShape, mixer: str) -> list[Matrix]:
    """The matrices with which a block mixes tokens."""
    hidden, inner, states = shape.hidden, shape.state_width, shape.state_key_heads * shape.state_dim
    if mixer in ("attention", "sliding"):
        return _latent(shape) if shape.kv_rank else _attention(shape)
    if mixer == "none":
        return []
    between: list[Matrix] = []  # between the first matrix, with so many outputs, and the last one
    match mixer:
        case "delta":
            outputs = 2 * states + 2 * inner
            between = [Matrix("linear_attn.in_proj_ba", hidden, 2 * shape.state_heads, "in")]
        case "state space":
            outputs = 2 * inner + 2 * states + shape.state_heads
        case "scan":
            step, outputs = -(-hidden // 16), 2 * inner
            between = [
                Matrix("mixer.x_proj", inner, step + 2 * shape.state_dim, "low"),
                Matrix("mixer.dt_proj", step, inner, "low"),
            ]
        case "conv":
            outputs, inner = 3 * hidden, hidden
        case _:
            outputs = 2 * inner
            between = [Matrix("rg_lru.gates", inner, 2 * inner // shape.heads, "router")]
    name = _STATES.get(mixer, "mixer")
    first = Matrix(f"{name}.in_proj", hidden, outputs, "in")
    return [first, *between, Matrix(f"{name}.out_proj", inner, hidden, "out")]


def _attention(shape: ModelShape) -> list[Matrix]:
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    bias = shape.qkv_bias or shape.bias
    if shape.family in _PACKED:
        packed, out, *_ = _PACKED[shape.family]
        return [Matrix(packed, hidden, q + 2 * kv, "in", bias), Matrix(out, q, hidden, "out", shape.bias)]
    out = _OWN.get(shape.family, ("o_proj",))[0]
    return [
        Matrix("self_attn.q_proj", hidden, q * (1 + shape.gated_attention), "in", bias),
        Matrix("self_attn.k_proj", hidden, kv, "in", bias),
        Matrix("self_attn.v_proj", hidden, kv, "in", bias),
        Matrix(f"self_attn.{out}", q, hidden, "out", shape.bias),
    ]


def _latent(shape: ModelShape) -> list[Matrix]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    hidden, heads, q = shape.hidden, shape.heads, shape.heads * shape.head_dim
    outputs = heads * (shape.head_dim - shape.rope_dim + shape.value_dim)
    queries = [Matrix("self_attn.q_proj", hidden, q, "in")]
    if rank := shape.query_rank:
        queries = [
            Matrix("self_attn.q_a_proj", hidden, rank, "in"),
            Matrix("self_attn.q_b_proj", rank, q, "low"),
        ]
    return [
        *queries,
        Matrix("self_attn.kv_a_proj_with_mqa", hidden, shape.kv_rank + shape.rope_dim, "in"),
        Matrix("self_attn.kv_b_proj", shape.kv_rank, outputs, "low"),
        Matrix("self_attn.o_proj", heads * shape.value_dim, hidden, "out"),
    ]


def _feeding(shape: ModelShape, feed: str) -> list[Matrix]:
    """The matrices of a block's MLP, or of its router, experts and shared MLP."""
    if feed != "experts":
        return _mlp(shape, "mlp", shape.intermediate) if feed == "dense" else []
    hidden, width, count = shape.hidden, shape.expert_width, shape.experts
    return [
        Matrix("mlp.gate", hidden, count, "router"),
        Matrix("mlp.experts.gate_up_proj", hidden, (1 + shape.gated) * width, "expert up", stacked=count),
        Matrix("mlp.experts.down_proj", width, hidden, "expert down", stacked=count),
        *(_mlp(shape, "mlp.shared_expert", shape.shared_width) if shape.shared_width else []),
        *([Matrix("mlp.shared_expert_gate", hidden, 1, "in")] if shape.gates_shared else []),
    ]


def _mlp(shape: ModelShape, name: str, width: int) -> list[Matrix]:
    """The matrices of an MLP: gate, up and down (arXiv 2002.05202), or up and down."""
    hidden, bias, packed = shape.hidden, shape.bias, _PACKED.get(shape.family)
    up, down = (packed or _OWN.get(shape.family, ("", "up_proj", "down_proj")))[-2:]
    ups = [Matrix(f"{name}.{up}", hidden, width * (2 if packed and shape.gated else 1), "up", bias)]
    if shape.gated and not packed:
        ups.insert(0, Matrix(f"{name}.gate_proj", hidden, width, "up", bias))
    return [*ups, Matrix(f"{name}.{down}", width, hidden, "down", bias)]


def parts_of(shape: ModelShape, block: Block) -> list[Matrix]:
    """The matrices of one block and its vectors: each bias, and all norms, convolutions and so on as one."""
    matrices = matrices_of(shape, block)
    biases = [Matrix(f"{m.name}.bias", 1, m.outputs, "vector") for m in matrices if m.bias]
    return [*matrices, *biases, Matrix("norms", 1, _vectors(shape, block), "vector")]


def num_parameters(shape: ModelShape, head_outputs: int | None = None) -> int:
    """How many elements all weights have together, with every expert's; `head_outputs` as in head_of."""
    blocks = sum(part.elements * block.count for block in shape.blocks for part in parts_of(shape, block))
    return blocks + sum(part.elements for part in outer_parts(shape, head_outputs))


def head_of(shape: ModelShape, head_outputs: int | None = None) -> Matrix:
    """The matrix of the output head: for logits of the vocabulary, or for `head_outputs` scores in their
    place. It has no elements for 0."""
    if head_outputs is None:
        return Matrix("lm_head", shape.hidden, shape.vocab, "out")
    return Matrix("score", shape.hidden, head_outputs, "out")


def outer_parts(shape: ModelShape, head_outputs: int | None = None) -> list[Matrix]:
    """The weights outside the blocks: embeddings, learned positions, image tower, last norm, and the head if
    it is not the embeddings' weight. `head_outputs` as in head_of."""
    parts = [Matrix("embed_tokens", shape.hidden, shape.vocab, "in")]
    is_tied = shape.tied and head_outputs is None
    parts += [] if is_tied or head_outputs == 0 else [head_of(shape, head_outputs)]
    parts += [Matrix("position_embeddings", shape.hidden, shape.positions, "in")] if shape.positions else []
    parts += [Matrix(TOWER, 1, shape.tower, "vector")] if shape.tower else []
    return [*parts, Matrix("norm", 1, shape.hidden * (1 + shape.layer_norm), "vector")]


def _vectors(shape: ModelShape, block: Block) -> int:
    """How many elements a block's norms, convolutions and per-head vectors have together."""
    both = block.feed != "none" and block.mixer != "none"
    elements = (shape.norms if both else 1) * shape.hidden * (1 + shape.layer_norm)
    if block.mixer in ("attention", "sliding"):
        heads = shape.heads + shape.kv_heads if shape.family.startswith("olmo") else 2  # one norm for all
        return elements + shape.kv_rank + shape.query_rank + heads * shape.head_dim * shape.qk_norm
    if block.mixer == "none":
        return elements
    scans = block.mixer == "scan"
    width = shape.hidden if block.mixer == "conv" else shape.state_width
    keys = 0 if scans or block.mixer == "conv" else 2 * shape.state_key_heads * shape.state_dim
    elements += (width + keys) * shape.conv_kernel + width * shape.state_dim * scans
    if "state space" in block.mixer:  # the convolution's bias, the norm, and each head's step, decay and skip
        return elements + (width + keys) + width + 3 * shape.state_heads
    # a gated delta rule has the norm of a head, and each head's step and decay
    gated = block.mixer == "delta" and shape.gated_attention
    return elements + (shape.state_head_dim + 2 * shape.state_heads) * gated


def quantized(matrix: Matrix, storage: str, double_quant: bool) -> tuple[int, str]:
    """Bytes of a quantized weight with its constants, and the formula in words. `storage`: nf4, fp4 or int8.

    4 bit: half a byte for each element, a table of 16 fp32 values, and an fp32 maximum for each block of 64
    elements. Double quantization has one byte for each maximum, an fp32 scale for each 256 of them, a table
    of 256 fp32 values and one fp32 offset (bitsandbytes.functional.quantize_4bit, 0.50). int8: one byte for
    each element, and an fp32 scale for each row.
    """
    n, rows, blocks = matrix.elements, matrix.outputs, -(-matrix.elements // 64)
    shown = f"{rows * matrix.stacked:,}·{matrix.inputs:,}"
    if storage == "int8":
        return n + 4 * rows, f"{shown} × 1 B + {rows:,} × 4 B scales"
    if double_quant:
        maxima = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4
        return -(-n // 2) + 64 + maxima, f"{shown} × (1/2 + 1/64 + 4/(64·256)) B + 1,092 B of tables"
    return -(-n // 2) + 64 + 4 * blocks, f"{shown} × (1/2 + 4/64) B + 64 B of tables"
