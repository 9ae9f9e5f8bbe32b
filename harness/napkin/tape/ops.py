"""Operators and layers on a tape: casts, sums and products, dropout, norms, rotary embeddings, activations.

Each layer is its forward as transformers 5.23 writes it.
"""

from __future__ import annotations

from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.layers import LAYER_NORM_FAMILIES
from harness.napkin.tape.tape import Tape, Tensor, promoted

HALF_ROTATED = (1 + 2, 1 + 3 + 3)
"""Passes over it. Forward: minus one half, and both put together. Backward: minus that half, each half put
into zeros (half read, the whole written), and the sum of both."""


def cast(tape: Tape, x: Tensor, dtype: str) -> Tensor:
    """x.to(dtype): nothing if it has that dtype, else a copy. It keeps nothing."""
    if x.dtype == dtype:
        return x
    before = tape.casts.get((id(x), dtype)) if tape.compiled else None
    if before is None:
        before = tape.casts[id(x), dtype] = tape.op(f"{x.name} to {dtype}", x.dims, dtype, [x])
    return before


def under_autocast(tape: Tape, x: Tensor) -> Tensor:
    """What a matrix product sees of an activation: a 16-bit copy, made anew for every product."""
    return cast(tape, x, tape.autocast) if tape.autocast else x


def add(tape: Tape, a: Tensor, b: Tensor, name: str, *, recomputable: bool = False) -> Tensor:
    """a + b, in the wider dtype. Keeps nothing; both get the gradient as it is.

    The residual stream is never recomputed: the sums in it would lead back to the embeddings.
    """
    dtype = promoted(a.dtype, b.dtype)
    return tape.op(name, a.dims, dtype, [a, b], passes_gradient=True, recomputable=recomputable)


def multiply(
    tape: Tape, a: Tensor, b: Tensor, name: str, dims: str | None = None, *, columns: int = 0
) -> Tensor:
    """a * b: keeps each factor that the other's gradient needs. `b` may be smaller and broadcast; with
    `columns` it is a vector of so many."""
    dtype = promoted(a.dtype, b.dtype)
    # the smaller factor's gradient is summed from a product of the full size
    summed = a.size_bytes if b.grad and b.size_bytes < a.size_bytes else 0
    staged = 0
    if summed and columns:
        staged = sum_of_rows_bytes(a.size_bytes // SIZES[a.dtype] // columns, columns, tape.gpu_threads)
        staged = max(0, staged - (a.size_bytes if tape.hooked else 0))
    saves = [b if a.grad else None, a if b.grad else None]
    return tape.op(name, dims or a.dims, dtype, [a, b], saves, temporary_bytes=summed, workspace_bytes=staged)


def sum_of_rows_bytes(rows: int, columns: int, gpu_threads: int) -> int:
    """What CUDA takes to sum rows into one (ATen/native/cuda/Reduce.cuh, setReduceConfig).

    A block of 32 x 4 threads sums 128 columns, four a thread. Where these blocks leave the GPU idle, several
    share the rows of each, and meet in a buffer with 32 x 4 fp32 places for every column.
    """
    grid, most = -(-columns // 128), gpu_threads // 128
    values = -(-rows // 4)  # a thread's
    if columns % 4 or columns < 128 or values < 256 or grid > most:
        return 0
    blocks = max(min(-(-most // grid), -(-values // 16)), -(-values // 256))
    return 4 * columns * blocks * 128 if blocks > 1 else 0


def scale(tape: Tape, x: Tensor, name: str) -> Tensor:
    """x times a number: keeps nothing."""
    return tape.op(name, x.dims, x.dtype, [x])


def dropout(tape: Tape, x: Tensor, p: float) -> Tensor:
    """native_dropout: a new tensor and a mask of one byte an element; nothing at all for p = 0."""
    if not p:
        return x
    mask = None if tape.compiled else tape.tensor(f"mask of {x.name}", x.dims, "bool")
    return tape.op(f"{x.name} dropped", x.dims, x.dtype, [x], [mask])


def norm(tape: Tape, built: BuiltModel, x: Tensor, name: str) -> Tensor:
    """The family's norm over the last dim of x."""
    if built.shape.family in LAYER_NORM_FAMILIES:
        return _layer_norm(tape, x, name)
    return _rms_norm(tape, built, x, name)


def _layer_norm(tape: Tape, x: Tensor, name: str) -> Tensor:
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
        return cast(tape, multiply(tape, normed, weight, name, columns=width), x.dtype)
    weight = Tensor(f"{name}: weight", "width", dtype, 0, trained)  # a parameter: kept anyway
    return multiply(tape, cast(tape, normed, x.dtype), weight, name, columns=width)


def rotate(tape: Tape, built: BuiltModel, x: Tensor, tables: tuple[Tensor, Tensor], name: str) -> Tensor:
    """Rotary embeddings (arXiv 2104.09864): x·cos + rotate_half(x)·sin. The tables are kept, and shared."""
    cos, sin = tables
    shape = built.shape
    part, dims = x, x.dims
    partial = shape.rotary_dim < shape.head_dim or shape.family == "phi3"  # Phi-3 always concatenates
    if partial and shape.rotary_dim:
        dims = x.dims.rsplit(" ", 1)[0] + " O"
        part = tape.slice(x, f"{name} rotated part", dims)
    half = tape.op(f"{name}: half rotated", dims, part.dtype, [part], passes=HALF_ROTATED)
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
    cubic = scale(tape, cube, f"{name}: 0.044715x³")
    inner = scale(tape, add(tape, x, cubic, f"{name}: sum", recomputable=True), f"{name}: √(2/π)·")
    bent = tape.op(f"{name}: tanh", x.dims, inner.dtype, [inner], keeps_output=True)
    return multiply(
        tape, half, tape.op(f"{name}: 1 + tanh", x.dims, bent.dtype, [bent], passes_gradient=True), name
    )
