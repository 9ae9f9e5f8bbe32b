"""What bitsandbytes' operators allocate inside on CUDA (bitsandbytes/backends/cuda/ops.py)."""

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from harness.kernels.gpu import Gpu
from harness.kernels.matmul import call_cublas, calls_cublaslt
from harness.kernels.operators import declare, kernel
from harness.kernels.reductions import Kernel, reduce
from harness.kernels.script import Script, size_of
from harness.system import installed_version, replaced

FEW_ROWS = 8
"""Where bitsandbytes' tables cannot be read, its own 4-bit kernel is taken to run below so many rows."""


@cache
def bitsandbytes_cuda() -> Any:
    """bitsandbytes' module of CUDA operators, imported in such a way that torch needs no CUDA; None where a
    release lacks the names that are used here.
    """
    try:
        with replaced(torch._C, "_cuda_getCurrentRawStream", None):
            from bitsandbytes.backends.cuda import ops
    except (ImportError, AttributeError):
        return None
    names = ("_gemm_4bit_custom_max_m", "_gemm_4bit_use_custom_fn", "_gpu_dispatch_props")
    return ops if all(hasattr(ops, name) for name in names) else None


def unasked_tables(operators: Iterable[str]) -> list[str]:
    """A warning if one of the operators ("aten::mm") depends on bitsandbytes tables that cannot be read."""
    if "bitsandbytes::gemm_4bit" not in operators or bitsandbytes_cuda() is not None:
        return []
    release = installed_version("bitsandbytes")
    silent = f"bitsandbytes {release} does not say which of its kernels multiplies by a 4-bit weight"
    return [f"{silent}: from {FEW_ROWS} rows on it is taken to be dequantized whole"]


@kernel("bitsandbytes::gemm_4bit")
def gemm_4bit(
    script: Script,
    A: Tensor,
    shapeB: Sequence[int],
    blocksize: int,
    bias: Tensor | None,
    absmax_8bit: Tensor | None,
    gpu: Gpu,
) -> None:
    """Above a number of rows the weight is dequantized as a whole and multiplied by F.linear; below, a kernel
    of its own reads it as it is. The 8-bit scales of double quantization are dequantized, and copied once
    more as the offset is added.
    """
    rows = prod(A.shape[:-1])
    if reads_4bit_weights(rows, shapeB, blocksize, A.dtype, gpu):
        script.output(0)
        return
    offset_free = scaled = None
    if absmax_8bit is not None:
        offset_free, scaled = (script.take(absmax_8bit.numel() * 4) for _ in range(2))
    weight = script.take(prod(shapeB) * A.dtype.itemsize)
    script.output(0)
    columns, inner = shapeB
    call_cublas(
        script, gpu, lt=bias is not None and calls_cublaslt(bias, (rows, inner), (inner, columns), gpu)
    )
    script.free(scaled, offset_free, weight)  # as Python clears the locals of a function


def reads_4bit_weights(
    rows: int, weight_shape: Sequence[int], block_size: int, dtype: torch.dtype, gpu: Gpu
) -> bool:
    """Whether bitsandbytes runs its own kernel, instead of dequantizing the weight and multiplying.

    It decides by rows, shape, dtype and GPU from tables of its own, which are asked here. Where they cannot
    be asked (a release may rename them), its own kernel is taken to run below FEW_ROWS rows.
    """
    if weight_shape[1] % block_size != 0:
        return False
    operators = bitsandbytes_cuda()
    if operators is None:
        return rows < FEW_ROWS
    if rows > operators._gemm_4bit_custom_max_m:
        return False
    properties = gpu.sm_count, *gpu.capability
    with replaced(operators, "_gpu_dispatch_props", lambda _: properties):
        return operators._gemm_4bit_use_custom_fn(0, dtype, rows, *weight_shape)


def _int8_product_result(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """The product of int8 A (rows, in) and B (out, in) in A's dtype, and A's columns with outliers: none.

    bitsandbytes' own shape function needs a size that depends on values, which shape-only tensors lack.
    """
    given, quantized, weight = args[:3]
    out = torch.empty((*quantized.shape[:-1], weight.shape[0]), dtype=given.dtype, device=given.device)
    return out, torch.empty(0, dtype=given.dtype, device=given.device)


@kernel("bitsandbytes::int8_mixed_scaled_mm", result=_int8_product_result)
def int8_product(script: Script, A: Tensor, CA: Tensor, CB: Tensor) -> None:
    """Without outliers: int32 products, which are dequantized to fp16 and converted to A's dtype."""
    elements = prod(CA.shape[:-1]) * CB.shape[0]
    products = script.take(elements * 4)
    half = script.take(0 if A.dtype == torch.float16 else elements * 2)
    script.output(0)
    script.free(half, products)


def _int8_quantized(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise int8, fp32 scales, and the columns with outliers, which depend on values: taken to be none."""
    rows = args[0]
    quantized = torch.empty_like(rows, dtype=torch.int8)
    scales = torch.empty(rows.shape[:-1].numel(), dtype=torch.float32, device=rows.device)
    return quantized, scales, torch.empty(0, dtype=torch.int64, device=rows.device)


@kernel("bitsandbytes::int8_vectorwise_quant", result=_int8_quantized)
def int8_quantize(script: Script, A: Tensor, threshold: float, gpu: Gpu) -> None:
    """Torch operators find the columns with outliers, and have temporaries of their own."""
    script.output(1, 0)
    if threshold > 0:
        magnitude = script.take(size_of(A))
        outliers = script.take(A.numel())
        script.free(magnitude)
        any_outlier = script.take(1)
        reduce(script, A.new_empty(A.shape, dtype=torch.bool), (), torch.bool, Kernel(1), gpu)
        script.free(any_outlier)
        script.briefly(1)  # the 0 written into the columns with outliers, here none
        script.free(outliers)


@kernel("bitsandbytes::quantize_4bit bitsandbytes::quantize_blockwise")
def quantize_blocks(script: Script, A: Tensor) -> None:
    """The scales are allocated before the quantized values."""
    copy = None if A.is_contiguous() else script.take(size_of(A))
    script.output(1, 0)
    script.free(copy)


declare(
    """
    bitsandbytes::dequantize_4bit bitsandbytes::dequantize_blockwise
    bitsandbytes::optimizer_update_32bit bitsandbytes::optimizer_update_8bit_blockwise
    """,
    nothing="one kernel over contiguous tensors",
)
