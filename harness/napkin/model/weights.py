"""Bytes of parameters, buffers and adapters, exactly as the built model's tensors hold them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.layers import (
    Matrix,
    block_vectors,
    expert_matrices,
    outer_vectors,
    router_matrix,
)
from harness.recipe import surprises_of_quantization

BLOCK_4BIT = 64
"""Values that share one absolute maximum in NF4 and FP4 (bitsandbytes.nn.Params4bit)."""
BLOCK_NESTED = 256
"""Absolute maxima that share one scale under double quantization (bitsandbytes.functional.quantize_4bit)."""


@dataclass(frozen=True)
class Weight:
    """A kind of parameter: `count` tensors of `rows` x `columns` elements (a vector has one row)."""

    name: str
    rows: int
    columns: int
    dtype: str
    """fp32, bf16, fp16, or the quantized format nf4, fp4, int8."""
    size_bytes: int
    """Of one tensor, with its quantization state."""
    trained: bool
    count: int = 1
    formula: str = ""
    matrix: bool = True
    """Two or more dimensions: optimizers factor these only."""
    stacked: int = 1
    """Matrices that are stacked in one tensor: a mixture's experts."""
    adapter: bool = False
    """Added by peft."""
    used_as: str = ""
    """The dtype in which it is used, if it is cast as it arrives from host memory."""
    larger_gradient: int = 0
    """Elements of its gradient, where they are more than its own."""

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return self.rows * self.columns

    @property
    def quantized(self) -> bool:
        """Stored in a format that has no element of a whole number of bytes, or scales beside them."""
        return self.dtype not in SIZES

    @property
    def used_bytes(self) -> int:
        """Bytes of one tensor on the device while it is in use."""
        return self.elements * SIZES[self.used_as] if self.used_as else self.size_bytes

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes

    @property
    def gradient_elements(self) -> int:
        """Elements of the gradient of one tensor."""
        return self.larger_gradient or self.elements


def outer_weights(built: BuiltModel) -> list[Weight]:
    """Embeddings, output head, final norm: what is outside the blocks."""
    shape, base, dtype = built.shape, built.trains_base, built.loose_dtype
    result = [_plain(built.embedding, dtype, base)]
    gradient = built.embedding_gradient_elements
    if (
        not shape.tied and gradient > result[0].elements
    ):  # a tied one is divided as the head's is, being added
        result[0] = replace(result[0], larger_gradient=gradient)
    if not shape.tied:
        used_as = built.linear_dtype(built.head)
        result.append(replace(_plain(built.head, dtype, base), used_as=used_as))
    if shape.head_bias:
        result.append(_vector("lm_head.bias", built.head.outputs, dtype, base))
    if shape.positions:
        result.append(_plain(Matrix("position_embeddings", shape.hidden, shape.positions), dtype, base))
    result += [_vector(v.name, v.elements, dtype, base) for v in outer_vectors(shape)]
    return result + _adapter_weights(built, built.head, 1)


def block_weights(built: BuiltModel) -> list[Weight]:
    """The weights of the blocks; `count` is the number of layers."""
    shape, base, dtype = built.shape, built.trains_base, built.loose_dtype
    result: list[Weight] = []
    for matrix in built.block_matrices():
        used_as = "" if matrix.stacked else built.linear_dtype(matrix)
        plain = replace(_plain(matrix, dtype, base, shape.layers), used_as=used_as)
        storage = built.quantized(matrix)
        stored = _quantized(built, matrix, storage) if storage else plain
        result.append(replace(stored, stacked=matrix.parts))
        if matrix.bias:
            result.append(_vector(f"{matrix.name}.bias", matrix.outputs, dtype, base, shape.layers))
        result += _adapter_weights(built, matrix, shape.layers)
    if shape.experts:
        result.append(_plain(router_matrix(shape), dtype, base, shape.layers))
        result += _adapter_weights(built, router_matrix(shape), shape.layers)
    return result + [_vector(v.name, v.elements, dtype, base, shape.layers) for v in block_vectors(shape)]


def buffer_bytes(built: BuiltModel) -> int:
    """Rotary frequencies, two fp32 copies of rotary_dim / 2, and Gemma's embedding scale."""
    scale = SIZES[built.made_dtype] if built.shape.family in ("gemma", "gemma2") else 0
    return 2 * (built.shape.rotary_dim // 2) * SIZES["fp32"] + scale


def surprises(built: BuiltModel) -> list[str]:
    """What quantization leaves otherwise than the recipe lets expect, as a run and a simulation say it."""
    experts = [matrix for matrix in expert_matrices(built.shape) if built.quantized(matrix)]
    in_blocks = block_weights(built)
    left: dict[str, int] = defaultdict(int)
    for weight in in_blocks:
        if weight.matrix and not (weight.trained or weight.quantized):
            parameter = weight.name if ".experts." in weight.name else f"{weight.name}.weight"
            left[".".join(parameter.rsplit(".", 2)[-2:])] += weight.total_bytes
    return surprises_of_quantization(
        built.recipe,
        [matrix.name.rpartition(".")[2] for matrix in experts],
        sum(matrix.elements for matrix in experts) * built.shape.layers,
        left,
        sum(weight.total_bytes for weight in [*outer_weights(built), *in_blocks]),
    )


def quantized_bytes(elements: int, quantization: str, double_quant: bool, rows: int = 0) -> int:
    """Bytes of a quantized weight and its state.

    4 bit: ceil(n / 2) packed; a table of 16 fp32 values; an fp32 absolute maximum for each block of 64.
    Double quantization stores those maxima in one byte each, with an fp32 scale for each 256 of them, a
    table of 256 fp32 values and one fp32 offset (bitsandbytes.functional.quantize_4bit, 0.50).
    int8: one byte, and an fp32 scale for each row (int8_vectorwise_quant).
    """
    if quantization == "int8":
        return elements + 4 * rows
    blocks = -(-elements // BLOCK_4BIT)
    maxima = blocks + 4 * -(-blocks // BLOCK_NESTED) + 4 * 256 + 4 if double_quant else 4 * blocks
    return -(-elements // 2) + 4 * 16 + maxima


def _quantized(built: BuiltModel, matrix: Matrix, storage: str) -> Weight:
    size = quantized_bytes(matrix.elements, storage, built.scales_quantized, matrix.outputs)
    n = f"{matrix.outputs:,}·{matrix.inputs:,}"
    if storage == "int8":
        formula = f"{n} × 1 B + {matrix.outputs:,} × 4 B scales"
    elif built.scales_quantized:
        formula = f"{n} × (1/2 + 1/64 + 4/(64·256)) B + 1,092 B of tables"
    else:
        formula = f"{n} × (1/2 + 4/64) B + 64 B of tables"
    layers = built.shape.layers
    return Weight(matrix.name, matrix.outputs, matrix.inputs, storage, size, False, layers, formula)


def _plain(matrix: Matrix, dtype: str, trained: bool, count: int = 1) -> Weight:
    size = matrix.elements * SIZES[dtype]
    formula = f"{matrix.outputs:,}·{matrix.inputs:,} × {SIZES[dtype]} B"
    return Weight(matrix.name, matrix.outputs, matrix.inputs, dtype, size, trained, count, formula)


def _vector(name: str, elements: int, dtype: str, trained: bool, count: int = 1) -> Weight:
    size = elements * SIZES[dtype]
    return Weight(name, 1, elements, dtype, size, trained, count, f"{elements:,} × {SIZES[dtype]} B", False)


def _adapter_weights(built: BuiltModel, matrix: Matrix, count: int) -> list[Weight]:
    """LoRA: A is rank x inputs, B outputs x rank (arXiv 2106.09685). IA3: one scale an output, or an input
    of a feed-forward layer (arXiv 2205.05638)."""
    kind = built.adapted.get(matrix.name)
    if kind is None:
        return []
    name, rank = matrix.name, built.adapter_ranks(matrix)
    if kind == "ia3":
        added = [Matrix(f"{name}.ia3", 1, matrix.outputs)]
    elif kind == "ia3_feedforward":
        added = [Matrix(f"{name}.ia3", matrix.inputs, 1)]
    else:
        a = Matrix(f"{name}.lora_A", matrix.inputs, rank)
        added = [a, Matrix(f"{name}.lora_B", rank, matrix.outputs // matrix.parts)]
    dtype = built.adapter_dtype(matrix)
    return [replace(_plain(m, dtype, True, count), adapter=True) for m in added]
