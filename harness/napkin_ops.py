"""Layers as operators on a tape: casts, linear layers with their adapters, norms, rotary, dropout.

Each function is one layer's forward as transformers 5.23, peft 0.21 and bitsandbytes 0.50 write it.
"""

from __future__ import annotations

from math import prod

from harness.napkin_layers import LAYER_NORM_FAMILIES, Matrix
from harness.napkin_model import BuiltModel
from harness.napkin_tape import SIZES, Tape, Tensor


def cast(tape: Tape, x: Tensor, dtype: str) -> Tensor:
    """x.to(dtype): nothing if it has that dtype, else a copy. It keeps nothing."""
    if x.dtype == dtype:
        return x
    return tape.op(f"{x.name} to {dtype}", x.dims, dtype, [x])


def under_autocast(tape: Tape, x: Tensor) -> Tensor:
    """What a matrix product sees of an activation: a 16-bit copy, made anew for every product."""
    return cast(tape, x, tape.autocast) if tape.autocast else x


def add(tape: Tape, a: Tensor, b: Tensor, name: str) -> Tensor:
    """a + b, in the wider dtype. Keeps nothing; both get the gradient as it is."""
    dtype = a.dtype if SIZES[a.dtype] >= SIZES[b.dtype] else b.dtype
    return tape.op(name, a.dims, dtype, [a, b], passes_gradient=True, recomputable=False)


def multiply(tape: Tape, a: Tensor, b: Tensor, name: str, dims: str | None = None) -> Tensor:
    """a * b: keeps each factor that the other's gradient needs. `b` may be smaller and broadcast."""
    dtype = a.dtype if SIZES[a.dtype] >= SIZES[b.dtype] else b.dtype
    # the smaller factor's gradient is summed from a product of the full size
    summed = a.size_bytes if b.grad and b.size_bytes < a.size_bytes else 0
    saves = [b if a.grad else None, a if b.grad else None]
    return tape.op(name, dims or a.dims, dtype, [a, b], saves, temporary_bytes=summed)


def scale(tape: Tape, x: Tensor, name: str) -> Tensor:
    """x times a number: keeps nothing."""
    return tape.op(name, x.dims, x.dtype, [x])


def dropout(tape: Tape, x: Tensor, p: float) -> Tensor:
    """native_dropout: a new tensor and a mask of one byte an element; nothing at all for p = 0."""
    if not p:
        return x
    mask = None if tape.compiled else tape.tensor(f"mask of {x.name}", x.dims, "bool")
    return tape.op(f"{x.name} dropped", x.dims, x.dtype, [x], [mask])


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
        return (
            _four_bit(tape, built, x, matrix, name, dims)
            if built.four_bit
            else _int8(tape, x, matrix, name, dims)
        )
    return plain_linear(tape, x, matrix, name, dims, built.loose_dtype, trained=built.trains_base)


def plain_linear(
    tape: Tape, x: Tensor, matrix: Matrix, name: str, dims: str, weight_dtype: str, *, trained: bool
) -> Tensor:
    """x W^T: keeps x if W is trained, and autocast's 16-bit copy of W if x needs a gradient.

    Autocast keeps its copy of a trained fp32 weight until the forward pass ends, and makes a frozen
    weight's anew every time (aten/src/ATen/autocast_mode.cpp, cached_cast).
    """
    x = under_autocast(tape, x)
    compute = tape.autocast or weight_dtype
    copy = None
    if compute != weight_dtype:
        copy = _weight_copy(tape, matrix, compute)
        if trained:
            tape.weight_cast_bytes += copy.size_bytes
    return tape.product(
        name,
        dims,
        compute,
        [x],
        [x if trained else None, copy if x.grad else None],
        flops=2 * _rows(tape, x, matrix) * matrix.elements,
        weight_bytes=matrix.elements * SIZES[compute],
        weight_gradient_bytes=_gradient_bytes(matrix, weight_dtype) if trained else 0,
        # under autocast the weight's gradient is 16 bit first, then cast to the weight's dtype
        backward_temporary_bytes=matrix.elements * SIZES[compute] if trained and copy else 0,
    )


def _weight_copy(tape: Tape, matrix: Matrix, dtype: str) -> Tensor:
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
        weight_bytes=matrix.elements // 2 + 2 * whole,
        forward_temporary_bytes=whole,
        backward_temporary_bytes=whole,
    )
    return cast(tape, out, dtype)


def _int8(tape: Tape, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """Linear8bitLt with outliers (threshold 6): keeps its input for columns that may be outliers; the
    input is quantized row by row, and backward dequantizes the weight (MatMul8bitLt)."""
    rows = _rows(tape, x, matrix)
    quantized_input = rows * matrix.inputs * (1 + (SIZES["fp16"] if x.dtype != "fp16" else 0))
    return tape.product(
        name,
        dims,
        x.dtype,
        [x],
        [x],
        flops=2 * rows * matrix.elements,
        weight_bytes=matrix.elements,
        forward_temporary_bytes=quantized_input + rows * matrix.outputs * SIZES["int32"],
        backward_temporary_bytes=matrix.elements * SIZES[x.dtype],
    )


def _lora(tape: Tape, built: BuiltModel, x: Tensor, matrix: Matrix, name: str, dims: str) -> Tensor:
    """base(x) + B(A(dropout(x))) · alpha/rank. With fp32 adapters on a 16-bit base, x is cast to fp32 for
    each adapted layer apart, and A keeps that copy (peft/tuners/lora/layer.py and bnb.py)."""
    recipe, quantized = built.recipe, built.quantized(matrix)
    out = _base(tape, built, x, matrix, name, dims)
    if quantized and built.four_bit:
        out = tape.op(f"{name} cloned", dims, out.dtype, [out], passes_gradient=True)
    dtype = built.adapter_dtype(matrix)
    casts = not (quantized and tape.autocast)  # under autocast the quantized layers leave it to autocast
    a = Matrix(f"{matrix.name}.lora_A", matrix.inputs, recipe.lora_rank)
    b = Matrix(f"{matrix.name}.lora_B", recipe.lora_rank, matrix.outputs)
    inner = dropout(tape, cast(tape, x, dtype) if casts else x, recipe.lora_dropout)
    rank_dims = f"{_leading(tape, x, matrix)} R"
    inner = plain_linear(tape, inner, a, f"{name}: A x", rank_dims, dtype, trained=True)
    inner = plain_linear(tape, inner, b, f"{name}: B A x", dims, dtype, trained=True)
    inner = scale(tape, inner, f"{name}: scaled")
    if quantized and casts:
        inner = cast(tape, inner, out.dtype)
    total = add(tape, out, inner, f"{name} adapted")
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
    if quantized and not tape.autocast:
        x = cast(tape, x, "fp32")
    if feedforward:
        given = x.dtype
        scaled = multiply(tape, x if quantized else cast(tape, x, dtype), scales, f"{name}: input scaled")
        return _base(tape, built, scaled if quantized else cast(tape, scaled, given), matrix, name, dims)
    out = _base(tape, built, x, matrix, name, dims)
    return cast(tape, multiply(tape, out, scales, f"{name} scaled"), out.dtype)


def norm(tape: Tape, built: BuiltModel, x: Tensor, name: str, dims: str | None = None) -> Tensor:
    """The family's norm over the last dim of x."""
    if built.shape.family in LAYER_NORM_FAMILIES:
        return _layer_norm(tape, built, x, name)
    return _rms_norm(tape, built, x, name)


def _layer_norm(tape: Tape, built: BuiltModel, x: Tensor, name: str) -> Tensor:
    """One kernel; keeps its input and a mean and a reciprocal deviation a row, in fp32."""
    if tape.autocast:  # layer_norm is on autocast's fp32 list
        x = cast(tape, x, "fp32")
    rows = x.dims.rsplit(" ", 1)[0]
    statistics = [tape.tensor(f"{name}: {what}", rows, "fp32") for what in ("mean", "1/deviation")]
    return tape.op(name, x.dims, x.dtype, [x], [x, *statistics])


def _rms_norm(tape: Tape, built: BuiltModel, x: Tensor, name: str) -> Tensor:
    """RMSNorm written out in Python: in fp32, with a product for each line of it."""
    trained, dtype = built.trains_base, built.loose_dtype
    rows = x.dims.rsplit(" ", 1)[0]
    wide = cast(tape, x, "fp32")
    square = tape.op(f"{name}: x²", x.dims, "fp32", [wide], [wide], temporary_bytes=2 * wide.size_bytes)
    mean = tape.op(f"{name}: mean", rows, "fp32", [square])
    root = tape.op(f"{name}: 1/rms", rows, "fp32", [mean], keeps_output=True)
    normed = multiply(tape, wide, root, f"{name}: x/rms", x.dims)
    width = x.size_bytes // SIZES[x.dtype] // tape.elements(rows)
    if built.shape.family in ("gemma", "gemma2"):  # (1 + weight) in fp32, then cast
        weight = Tensor(f"{name}: 1 + weight", "width", "fp32", 4 * width, trained)
        return cast(tape, multiply(tape, normed, weight, name), x.dtype)
    weight = Tensor(f"{name}: weight", "width", dtype, 0, trained)  # a parameter: kept anyway
    return multiply(tape, cast(tape, normed, x.dtype), weight, name)


def rotate(tape: Tape, built: BuiltModel, x: Tensor, tables: tuple[Tensor, Tensor], name: str) -> Tensor:
    """Rotary embeddings (arXiv 2104.09864): x·cos + rotate_half(x)·sin. The tables are kept, and shared."""
    cos, sin = tables
    shape = built.shape
    part, dims = x, x.dims
    partial = shape.rotary_dim < shape.head_dim or shape.family == "phi3"  # Phi-3 always concatenates
    if partial and shape.rotary_dim:
        dims = x.dims.rsplit(" ", 1)[0] + " O"
        part = tape.slice(x, f"{name} rotated part", dims)
    half = tape.op(f"{name}: half rotated", dims, part.dtype, [part])
    turned = add(
        tape,
        multiply(tape, part, cos, f"{name}·cos", dims),
        multiply(tape, half, sin, f"{name}·sin", dims),
        f"{name} rotated",
    )
    if not partial:
        turned.sources = x.sources or (x,) if tape.compiled else ()
        return turned
    return tape.op(f"{name} rotated", x.dims, turned.dtype, [turned, x], passes_gradient=False)


def activate(tape: Tape, built: BuiltModel, x: Tensor, name: str) -> Tensor:
    """The MLP's nonlinearity. SiLU and GELU keep their input; GPT-2's GELU is written out in Python as
    0.5x (1 + tanh(√(2/π) (x + 0.044715 x³))) and keeps x, 0.5x, the tanh and 1 + tanh."""
    if built.shape.activation != "gelu_new":
        return tape.op(name, x.dims, x.dtype, [x], [x])
    half = scale(tape, x, f"{name}: 0.5x")
    cubed_dtype = "fp32" if tape.autocast else x.dtype  # pow is on autocast's fp32 list
    wide = cast(tape, x, cubed_dtype)
    cube = tape.op(f"{name}: x³", x.dims, cubed_dtype, [wide], [wide])
    inner = scale(
        tape, add(tape, x, scale(tape, cube, f"{name}: 0.044715x³"), f"{name}: sum"), f"{name}: √(2/π)·"
    )
    bent = tape.op(f"{name}: tanh", x.dims, inner.dtype, [inner], keeps_output=True)
    return multiply(
        tape, half, tape.op(f"{name}: 1 + tanh", x.dims, bent.dtype, [bent], passes_gradient=True), name
    )
