"""Attention as operators on a tape: which kernel runs, and what each keeps of B·N·S² scores or of none.

Letters of dims: napkin/tape/dims.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from harness.errors import InputError
from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.ops import cast, dropout, scale, under_autocast
from harness.napkin.tape.tape import Tape, Tensor, promoted

Kernel = Literal["eager", "cudnn", "flash", "efficient", "math"]


def choose_kernel(built: BuiltModel, dtype: str, *, masked: bool, compute_capability: float) -> Kernel:
    """The kernel CUDA runs for queries of `dtype`, with or without an explicit mask.

    sdpa takes the first that can (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): cuDNN's for 16 bit
    on Hopper and data-center Blackwell, with dropout in sixteenths only; flash for 16 bit without a mask from
    compute capability 8.0 on; memory-efficient with as many key-value heads as query heads; else the plain
    one. transformers repeats the key-value heads only if there is a mask.
    """
    shape, attention = built.shape, built.recipe.attention
    if attention == "eager":
        return "eager"
    if shape.attention_softcap and attention == "sdpa":
        raise InputError(
            f"attention: sdpa: {shape.family} caps its attention scores, which sdpa cannot; "
            "set attention: eager."
        )
    half = dtype in ("bf16", "fp16")
    if built.recipe.flash_package:
        return "flash"
    widest = {9: 256, 10: 128}.get(int(compute_capability), 0)
    fits_cudnn = shape.head_dim <= widest and shape.head_dim % 8 == 0
    if half and fits_cudnn and 16 * shape.attention_dropout % 1 == 0:
        return "cudnn"
    if half and not masked and compute_capability >= 8 and shape.head_dim <= 256:
        return "flash"
    grouped = shape.heads != shape.kv_heads and not masked
    if grouped or (dtype == "bf16" and compute_capability < 8):
        return "math"
    return "efficient"


def described(built: BuiltModel, kernel: str) -> str:
    """What the recipe asks for and what runs, for people."""
    return f"attention: {built.recipe.attention}, kernel: {kernel}"


def given_masks(tape: Tape, built: BuiltModel, x: Tensor) -> list[Tensor]:
    """The mask that a batch of packed documents brings: eager's is added, sdpa's bool, flash needs none."""
    if built.recipe.flash_package:
        return []
    return [tape.tensor("mask", "M S S", "bool" if built.recipe.attention == "sdpa" else x.dtype)]


def masks_read(tape: Tape, built: BuiltModel, x: Tensor, given: Sequence[Tensor] | None) -> list[Tensor]:
    """The masks that blocks read: eager's additive ones, sdpa's bool one for a window or packed documents.

    `given`: those of packed documents, None without packing. A compiled model has one always: while it is
    traced, masking_utils.py cannot leave sdpa's out.
    """
    recipe, shape = built.recipe, built.shape
    if recipe.flash_package:
        return []
    if recipe.attention == "eager":
        two_kinds = shape.family == "gemma2" and given is None  # of layers, with a window and without
        return [tape.tensor("mask", "M S S", x.dtype) for _ in range(1 + two_kinds)]
    if tape.compiled:
        return [tape.tensor("mask", "M S S", tape.autocast or x.dtype)]
    if given is not None:
        return list(given)
    window = shape.sliding_window if shape.sliding_layers else None
    # every row has the same mask, kept once
    return [tape.tensor("mask", "S S", "bool")] if window and window < recipe.seq_len else []


def attention(
    tape: Tape,
    built: BuiltModel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    compute_capability: float,
) -> Tensor:
    """The attention output, B·S·N·D, from q (B S N D), k and v (B S G D)."""
    if built.recipe.attention == "eager":
        tape.attention_kernel = "eager"
        return _written_out(tape, built, q, k, v, mask, softmax_dtype="fp32")
    # sdpa is on autocast's 16-bit list; the flash packages take 16 bit only, and transformers casts to it
    if built.recipe.flash_package and not tape.autocast:
        half = built.recipe.compute_dtype
        q, k, v = (cast(tape, t, half) for t in (q, k, v))
    q, k, v = (under_autocast(tape, t) for t in (q, k, v))
    kernel = choose_kernel(built, q.dtype, masked=mask is not None, compute_capability=compute_capability)
    tape.attention_kernel = kernel
    if kernel == "math":
        return _plain_sdpa(tape, built, q, k, v)
    if mask is not None:
        k, v = _repeat(tape, built, k), _repeat(tape, built, v)
    return _fused(tape, built, q, k, v, mask, kernel)


def _flops(tape: Tape) -> int:
    """Two products of B·N·S²·D multiply-adds, as torch.utils.flop_counter counts them: the whole square, of
    which a causal kernel computes half."""
    return 4 * tape.elements("B N S S D")


def _fused(
    tape: Tape, built: BuiltModel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Kernel
) -> Tensor:
    """FlashAttention (arXiv 2307.08691), cuDNN's of the same kind, or memory-efficient attention (arXiv
    2112.05682): they keep q, k, v, the output and one fp32 log-sum-exp a row and head."""
    sums = tape.tensor("log-sum-exp", "B N S", "fp32")
    bias = None
    if mask is not None:  # sdpa turns a bool mask into one to add, anew in every layer
        bias = tape.op("mask to add", "M S S", q.dtype, [mask]) if mask.dtype == "bool" else mask
    out = tape.product(
        "attention",
        "B S N D",
        q.dtype,
        [q, k, v],
        [q, k, v, sums, bias],
        flops=_flops(tape),
        kind="attention",
        keeps_output=True,
        backward_temporary_bytes=_fused_backward_bytes(tape, built, q, kernel, masked=mask is not None),
    )
    # The output is laid out as q is, but for memory-efficient attention, which has it by position. Families
    # that concatenate q from parts have it by head, and copy.
    if kernel != "efficient" and built.shape.family in ("gpt_neox", "phi", "phi3"):
        return tape.op("attention by position", out.dims, out.dtype, [out], passes_gradient=True)
    return out


def _fused_backward_bytes(tape: Tape, built: BuiltModel, q: Tensor, kernel: Kernel, *, masked: bool) -> int:
    """The query gradient is summed up in fp32, with a row statistic; with grouped heads, flash and cuDNN make
    the key and value gradients for every query head first (csrc/flash_attn/flash_api.cpp, mha_bwd, which
    rounds S to 128 and D to 32; cudnn_frontend, SDPA backward node)."""
    shape = built.shape
    batch, seq = tape.sizes["B"], tape.sizes["S"]
    width = shape.head_dim
    if kernel == "flash":
        seq, width = -(-seq // 128) * 128, -(-width // 32) * 32
    rows = batch * shape.heads * seq
    sum_bytes = rows * (width + 1) * SIZES["fp32"] if q.dtype != "fp32" else rows * SIZES["fp32"]
    if masked or shape.kv_heads == shape.heads:
        return sum_bytes
    return sum_bytes + 2 * tape.elements("B S N D") * SIZES[q.dtype]


def _repeat(tape: Tape, built: BuiltModel, x: Tensor) -> Tensor:
    """Key-value heads copied for each query head they serve."""
    if built.shape.heads == built.shape.kv_heads:
        return x
    return tape.op(f"{x.name} repeated", "B S N D", x.dtype, [x])


def _contiguous(tape: Tape, x: Tensor) -> Tensor:
    """Heads before positions, as batched products want them: a copy unless the batch is one row."""
    if tape.sizes["B"] == 1:
        return x
    return tape.op(f"{x.name} by head", x.dims, x.dtype, [x], passes_gradient=True)


def _pair(tape: Tape, a: Tensor, b: Tensor, name: str, dims: str, flops: int) -> Tensor:
    """A product of two activations: each is kept if the other needs a gradient."""
    return tape.product(name, dims, a.dtype, [a, b], [a if b.grad else None, b if a.grad else None], flops)


def _softmax(tape: Tape, scores: Tensor, dtype: str, *, multiplied: bool) -> Tensor:
    """The weights in `dtype`. CUDA goes from fp16 to fp32 in one kernel and casts bf16 before; backward
    multiplies gradient and weights first (aten/src/ATen/native/SoftMax.cpp, cuda/SoftMax.cu).

    `multiplied`: a product reads them as they are. It keeps them, so they are not computed again either.
    """
    given = scores
    if scores.dtype == "bf16":
        scores = cast(tape, scores, dtype)
    out_bytes = tape.elements(scores.dims) * SIZES[dtype]
    weights = tape.op(
        "softmax",
        scores.dims,
        dtype,
        [scores],
        keeps_output=True,
        recomputable=not multiplied,
        temporary_bytes=out_bytes,
    )
    tape.hold(given)
    return weights


def _written_out(
    tape: Tape,
    built: BuiltModel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    softmax_dtype: str,
) -> Tensor:
    """Eager attention: scores, mask, softmax, and the weighted values, each of B·N·S² elements."""
    shape, given = built.shape, (q, k, v)
    grouped = shape.heads != shape.kv_heads
    k, v = _repeat(tape, built, k), _repeat(tape, built, v)
    repeated = k, v
    q, k, v = (under_autocast(tape, t) for t in (q, k, v))
    q = _contiguous(tape, q)
    k, v = (t if grouped else _contiguous(tape, t) for t in (k, v))  # repeated heads are in order already
    half = _flops(tape) // 2
    scores = _pair(tape, q, k, "scores", "B N S S", half)
    scores = scale(tape, scores, "scores scaled")
    if shape.attention_softcap:
        scores = scale(tape, scores, "scores / cap")
        scores = tape.op("tanh of scores", "B N S S", scores.dtype, [scores], keeps_output=True)
        scores = scale(tape, scores, "scores capped")
    if mask is not None:
        scores = tape.op(
            "scores masked",
            "B N S S",
            promoted(scores.dtype, mask.dtype),
            [scores, mask],
            passes_gradient=True,
        )
    upcast = softmax_dtype if shape.family != "gpt2" or tape.autocast else scores.dtype
    as_it_is = not shape.attention_dropout and upcast == (tape.autocast or v.dtype)
    weights = _softmax(tape, scores, upcast, multiplied=as_it_is)
    weights = dropout(tape, under_autocast(tape, cast(tape, weights, v.dtype)), shape.attention_dropout)
    out = _pair(tape, weights, v, "attention", "B S N D", half)
    out = tape.op("attention by position", "B S N D", out.dtype, [out], passes_gradient=True)
    tape.hold(weights, *given, *repeated)
    return out


def _plain_sdpa(tape: Tape, built: BuiltModel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fallback of sdpa: in fp32 whatever the inputs, key-value heads repeated, both factors scaled by
    the root of the scale (aten/src/ATen/native/transformers/attention.cpp,
    _scaled_dot_product_attention_math)."""
    given = q.dtype
    q, k, v = (cast(tape, t, "fp32") for t in (q, k, v))
    k, v = _repeat(tape, built, k), _repeat(tape, built, v)
    q, k = scale(tape, q, "q scaled"), scale(tape, k, "k scaled")
    q, k, v = _contiguous(tape, q), _contiguous(tape, k), _contiguous(tape, v)
    half = _flops(tape) // 2
    scores = _pair(tape, q, k, "scores", "B N S S", half)
    scores = tape.op("scores masked", "B N S S", "fp32", [scores], passes_gradient=True)
    weights = _softmax(tape, scores, "fp32", multiplied=not built.shape.attention_dropout)
    weights = dropout(tape, weights, built.shape.attention_dropout)
    out = _pair(tape, weights, v, "attention", "B S N D", half)
    out = cast(tape, out, given)
    return tape.op("attention by position", "B S N D", out.dtype, [out], passes_gradient=True)
