"""Linear layers on a tape, plain and quantized, with the adapters peft puts on them.

Each is its forward as torch, bitsandbytes 0.50 and peft 0.21 write it.
"""

from __future__ import annotations

from math import prod

from harness.hardware import Work
from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.divided import Style
from harness.napkin.model.layers import Matrix
from harness.napkin.tape.collectives import gathered, read_by_ranks, summed_over_ranks
from harness.napkin.tape.ops import add, cast, dropout, multiply, scale, under_autocast
from harness.napkin.tape.tape import NOTHING, Tape, Tensor


def linear(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """A linear layer with whatever peft put on it: x (..., inputs) to `dims` (..., outputs)."""
    kind = built.adapted.get(matrix.name)
    if kind == "lora":
        return _lora(tape, built, x, matrix, name, dims)
    if kind is not None:
        return _ia3(tape, built, x, matrix, name, dims)
    return _base(tape, built, x, matrix, name, dims)


def _base(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    if built.quantized(matrix):
        four_bit = built.recipe.four_bit
        return (_four_bit if four_bit else _int8)(tape, built, x, matrix, name, dims)
    dtype, divided = built.linear_dtype(matrix), built.divided(matrix)
    return plain_linear(tape, x, matrix, name, dims, dtype, trained=built.trains_base, divided=divided)


def plain_linear(
    tape: Tape,
    x: Tensor,
    matrix: Matrix,
    name: str,
    dims: str,
    weight_dtype: str,
    *,
    trained: bool,
    divided: Style | None = None,
) -> Tensor:
    """x W^T: keeps x if W is trained, and autocast's 16-bit copy of W if x needs a gradient. `matrix` is what
    a rank has of a layer that is `divided`.

    Autocast keeps its copy of a trained fp32 weight until the forward pass ends, and makes a frozen
    weight's anew every time (aten/src/ATen/autocast_mode.cpp, cached_cast).
    """
    if divided in ("colwise", "colwise_gather_output"):
        x = read_by_ranks(tape, x)
    x = under_autocast(tape, x)
    compute = tape.autocast or weight_dtype
    copy = None
    if compute != weight_dtype:
        copy = _weight_copy(matrix, compute)
        weight_bytes = matrix.elements * SIZES[weight_dtype]
        tape.weight_cast(f"{name}: weight to {compute}", weight_bytes, copy.size_bytes, trained=trained)
        if trained and tape.caches_casts:
            tape.cached.append(copy)
    gathers = divided == "colwise_gather_output"
    out = tape.product(
        name,
        dims.replace("V", "U") if gathers else dims,
        compute,
        [x],
        [x if trained else None, copy if x.grad else None],
        flops=2 * _rows(tape, x, matrix) * matrix.elements,
        keeps_weight=x.grad,
        weight_bytes=matrix.elements * SIZES[compute],
        weight_gradient_bytes=_gradient_bytes(matrix, weight_dtype) if trained else 0,
        # under autocast the weight's gradient is 16 bit first, then cast to the weight's dtype
        backward_temporary_bytes=matrix.elements * SIZES[compute] if trained and copy else 0,
    )
    if divided == "rowwise":
        return summed_over_ranks(tape, out)
    return gathered(tape, out, dims) if gathers else out


def _weight_copy(matrix: Matrix, dtype: str) -> Tensor:
    return Tensor(f"{matrix.name} in {dtype}", "weight", dtype, matrix.elements * SIZES[dtype], False)


def _gradient_bytes(matrix: Matrix, dtype: str) -> int:
    return (matrix.elements + matrix.bias * matrix.outputs) * SIZES[dtype]


def _rows(tape: Tape, x: Tensor, matrix: Matrix) -> int:
    return tape.elements(x.dims) // matrix.inputs


def _four_bit(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """Linear4bit: computes in the compute dtype and returns the input's. Keeps no activation: the frozen
    weight needs none. The whole weight is dequantized for each product (bitsandbytes gemm_4bit for more
    than 1536 rows, and MatMul4Bit.backward)."""
    dtype, compute = x.dtype, built.recipe.compute_dtype
    whole = matrix.elements * SIZES[compute]
    out = tape.product(
        name,
        dims,
        compute,
        [cast(tape, x, compute)],
        [],
        flops=2 * _rows(tape, x, matrix) * matrix.elements,
        weight_bytes=matrix.elements // 2,
        forward_temporary_bytes=whole,
        backward_temporary_bytes=whole,
        before_bytes=matrix.elements // 2 + whole,
    )
    return cast(tape, out, dtype)


def _int8(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """Linear8bitLt with outliers (threshold 6): keeps its input for columns that may be outliers; the
    input is quantized row by row, and backward dequantizes the weight (MatMul8bitLt, which keeps the input
    in `ctx.tensors` and not by save_for_backward)."""
    rows, size = _rows(tape, x, matrix), SIZES[x.dtype]
    given, made, half = rows * matrix.inputs, rows * matrix.outputs, SIZES["fp16"]
    converted = x.dtype != "fp16"  # the kernels take fp16 and return it
    quantized_input = given * (1 + converted * half)
    out = tape.product(
        name,
        dims,
        x.dtype,
        [x],
        [x],
        flops=2 * rows * matrix.elements,
        weight_bytes=matrix.elements,
        forward_temporary_bytes=quantized_input + made * SIZES["int32"],
        backward_temporary_bytes=matrix.elements * size,
        keeps_in_ctx=True,
    )
    op, dtype = tape.ops[-1], x.dtype
    to_half = converted * (size + half) * given
    magnitudes = 2 * (half + 1) * given  # and which of them are outliers: written, and read once
    before = to_half + (half + 1) * given + magnitudes
    products = made * (SIZES["int32"] + converted * half)
    moved = before + (size + 1) * given + matrix.elements + made * size + 2 * products
    op.forward = Work(op.forward.flops, moved, 2 + converted, "matmul", dtype, before)
    if op.backward is not NOTHING:  # the weight to x's dtype, times its scales in place
        before = matrix.elements * (1 + 3 * size)
        moved = before + (given + made + matrix.elements) * size
        op.backward = Work(op.backward.flops, moved, 3, "matmul", dtype, before)
    return out


def _lora(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """base(x) + B(A(dropout(x))) · alpha/rank. With fp32 adapters on a 16-bit base, x is cast to fp32 for
    each adapted layer apart, and A keeps that copy (peft/tuners/lora/layer.py and bnb.py)."""
    quantized, rank = built.quantized(matrix), built.adapter_ranks(matrix)
    out = _base(tape, built, x, matrix, name, dims)
    if quantized and built.recipe.four_bit:
        out = tape.op(f"{name} cloned", dims, out.dtype, [out], passes_gradient=True)
    dtype = built.adapter_dtype(matrix)
    casts = not (quantized and tape.autocast)  # under autocast the quantized layers leave it to autocast
    a = Matrix(f"{matrix.name}.lora_A", matrix.inputs, rank)
    b = Matrix(f"{matrix.name}.lora_B", rank, matrix.outputs)
    given = cast(tape, x, dtype) if casts else x
    inner = dropout(tape, given, built.adapter_dropout)
    rank_dims = f"{_leading(tape, x, matrix)} R"
    divided = built.divided(matrix)
    of_a, of_b = (divided, None) if divided == "rowwise" else (None, divided)
    inner = plain_linear(tape, inner, a, f"{name}: A x", rank_dims, dtype, trained=True, divided=of_a)
    inner = plain_linear(tape, inner, b, f"{name}: B A x", dims, dtype, trained=True, divided=of_b)
    inner = scale(tape, inner, f"{name}: scaled")
    if quantized and casts:
        inner = cast(tape, inner, out.dtype)
    total = add(tape, out, inner, f"{name} adapted")
    tape.hold(given)
    return cast(tape, total, out.dtype) if casts else total


def _leading(tape: Tape, x: Tensor, matrix: Matrix) -> str:
    """The dims of x before those that the layer contracts."""
    symbols = x.dims.split()
    while symbols and prod(tape.sizes[s] for s in symbols) > _rows(tape, x, matrix):
        symbols.pop()
    return " ".join(symbols)


def _ia3(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """Learned scales: on the output, or on the input of a feed-forward layer (peft/tuners/ia3)."""
    dtype, quantized = built.adapter_dtype(matrix), built.quantized(matrix)
    feedforward = built.adapted[matrix.name] == "ia3_feedforward"
    width = matrix.inputs if feedforward else matrix.outputs
    scales = Tensor(f"{name}: scales", "scales", dtype, width * SIZES[dtype], True)
    argument = x
    if quantized and not tape.autocast:
        x = cast(tape, x, "fp32")
    if feedforward:
        given = x.dtype
        wide = x if quantized else cast(tape, x, dtype)
        scaled = multiply(tape, wide, scales, f"{name}: input scaled", columns=width)
        scaled = scaled if quantized else cast(tape, scaled, given)
        out = _base(tape, built, scaled, matrix, name, dims)
        tape.hold(argument, wide)
        return out
    out = _base(tape, built, x, matrix, name, dims)
    return cast(tape, multiply(tape, out, scales, f"{name} scaled", columns=width), out.dtype)
