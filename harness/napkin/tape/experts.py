"""A mixture of experts as operators on a tape. Letters of dims: napkin/tape/dims.py."""

from __future__ import annotations

from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.layers import Matrix, expert_matrices, router_matrix
from harness.napkin.tape.linear import plain_linear
from harness.napkin.tape.ops import activate, cast, multiply, under_autocast
from harness.napkin.tape.tape import Tape, Tensor


def experts(tape: Tape, built: BuiltModel, x: Tensor) -> Tensor:
    """A mixture: each token's row goes to its experts, sorted by expert, through two grouped products
    (transformers/integrations/moe.py, grouped_mm_experts_forward)."""
    shape, trained, dtype = built.shape, built.trains_base, built.loose_dtype
    router = router_matrix(shape)
    if router.name in built.adapted:
        flops = 2 * tape.elements("T") * router.elements
        scores = _with_adapted_weight(tape, built, x, router, "E H", "router", "T E", flops)
    else:
        scores = plain_linear(tape, x, router, "router", "T E", dtype, trained=trained)
    chances = tape.op("router softmax", "T E", "fp32", [cast(tape, scores, "fp32")], keeps_output=True)
    chosen = tape.tensor("chosen experts", "T X", "int64")
    best = tape.op("best chances", "T X", "fp32", [chances], [chosen])
    total = tape.op("sum of chances", "T", "fp32", [best], [best])
    share = tape.op("expert weights", "T X", "fp32", [best, total], [total])
    order = tape.tensor("order of pairs", "P", "int64")
    sorted_share = tape.op("expert weights sorted", "P", "fp32", [share], [order], gathers=True)
    token = tape.tensor("token of pair", "P", "int64")
    rows = tape.op("rows of pairs", "P H", x.dtype, [x], [token], gathers=True)
    up_matrix, down_matrix = expert_matrices(shape)
    ends = tape.tensor("ends of experts", "E", "int32")
    # the parametrization's cache holds both dequantized weights until the experts are done
    cache: list[Tensor] = []
    packed = _grouped(tape, built, rows, up_matrix, "E J H", ends, cache, "gate and up", "P J")
    gate, up = tape.split(packed, [("gate", "P I"), ("up", "P I")])
    inner = multiply(tape, activate(tape, built, gate, "activation"), up, "gated")
    down = _grouped(tape, built, inner, down_matrix, "E H I", ends, cache, "experts out", "P H")
    weighted = multiply(tape, down, sorted_share, "experts out weighted", "P H")
    back = tape.tensor("order back", "P", "int64")
    restored = tape.op("pairs in order", "P H", weighted.dtype, [weighted], [back], gathers=True)
    return cast(tape, tape.op("sum over experts", "B S H", weighted.dtype, [restored]), x.dtype)


def _grouped(
    tape: Tape,
    built: BuiltModel,
    x: Tensor,
    matrix: Matrix,
    weight_dims: str,
    ends: Tensor,
    cache: list[Tensor],
    name: str,
    dims: str,
) -> Tensor:
    """A product with each row's own expert. Quantized experts are dequantized whole, and backward keeps
    that copy, since parametrization hides the quantized form (bitsandbytes.nn.parametrize)."""
    quantized = built.quantized(matrix)
    dtype = built.made_dtype if quantized else built.loose_dtype
    x = cast(tape, x, dtype)
    flops = 2 * tape.elements("P") * matrix.elements // built.shape.experts
    if matrix.name in built.adapted:
        return _with_adapted_weight(tape, built, x, matrix, weight_dims, name, dims, flops, ends)
    whole = Tensor(f"{matrix.name} dequantized", "weight", dtype, matrix.elements * SIZES[dtype], False)
    trained = built.trains_base
    if quantized:
        tape.weight_cast(f"{matrix.name} dequantized", matrix.elements // 2, whole.size_bytes, trained=False)
    holds = list(cache)
    if quantized and x.grad:
        cache.append(whole)
    return tape.product(
        name,
        dims,
        dtype,
        [x],
        [x if trained else None, whole if quantized and x.grad else None, ends],
        flops=flops,
        weight_bytes=whole.size_bytes,
        holds=holds,
        weight_gradient_bytes=whole.size_bytes if trained else 0,
    )


def _with_adapted_weight(
    tape: Tape,
    built: BuiltModel,
    x: Tensor,
    matrix: Matrix,
    weight_dims: str,
    name: str,
    dims: str,
    flops: int,
    ends: Tensor | None = None,
) -> Tensor:
    """A product with W + s·B A, made whole in every forward pass (peft/tuners/lora/layer.py, ParamWrapper).

    The adapters' copies in the weight's dtype are kept for the gradients of A and B.
    """
    stacked = ends is not None
    x = x if stacked else under_autocast(tape, x)  # grouped products are not on autocast's lists
    dtype = built.loose_dtype if stacked else tape.autocast or built.loose_dtype
    copied = built.adapter_dtype(matrix) != dtype and (stacked or tape.autocast is not None)
    rank = built.adapter_ranks(matrix)  # of all experts together
    factors = [
        Tensor(f"{matrix.name}.lora_{side}", "weight", dtype, copied * rank * width * SIZES[dtype], True)
        for side, width in (("A", matrix.inputs), ("B", matrix.outputs // matrix.parts))
    ]
    making = 2 * matrix.elements * (rank // matrix.parts)
    whole = tape.product(
        f"{matrix.name} adapted",
        weight_dims,
        dtype,
        factors,
        factors,
        flops=making,
        added_bytes=matrix.elements * SIZES[built.loose_dtype],
    )
    if stacked:  # torch's register_parametrization computes it once, to look at its dtype and shape
        tape.ops[-1].forward = tape.ops[-1].forward.times(2)
    return tape.product(name, dims, dtype, [x, whole], [x, whole if x.grad else None, ends], flops)
