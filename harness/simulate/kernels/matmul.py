"""Matrix products on CUDA: cuBLAS' workspaces, operands it cannot read, grouped and 4-bit products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from harness.simulate.kernels.script import Gpu, Script, product, size_of


@cache
def bitsandbytes_cuda() -> Any:
    """bitsandbytes' module of CUDA operators, which also imports where torch has no CUDA; None if it has not
    these names.
    """
    try:
        with patch.object(torch._C, "_cuda_getCurrentRawStream", None, create=True):
            from bitsandbytes.backends.cuda import ops
    except (ImportError, AttributeError):
        return None
    names = ("_gemm_4bit_custom_max_m", "_gemm_4bit_use_custom_fn", "_gpu_dispatch_props")
    return ops if all(hasattr(ops, name) for name in names) else None


MIB, KIB = 2**20, 2**10
THREADS = 2
"""That multiply in a training step, each with a workspace of its own: Python's, and autograd's."""


@dataclass(frozen=True)
class Workspaces:
    """What torch gives to cuBLAS and cuBLASLt, one of each per handle and stream.

    Each thread that multiplies has a handle of its own: the one that runs forward, and autograd's for the
    device. So a training step has two. They come from the caching allocator, right after the output of the
    first product that needs one.
    """

    cublas_bytes: int
    cublaslt_bytes: int
    """0: cuBLASLt shares cuBLAS' workspace. Only addmm with a one-dimensional bias calls cuBLASLt."""
    kept: bool
    """For the life of the process. Otherwise every call takes one and frees it."""


def cublas_workspaces(capability: tuple[int, int], torch_version: tuple[int, int]) -> Workspaces:
    """The defaults, CUBLAS_WORKSPACE_CONFIG and CUBLASLT_WORKSPACE_SIZE unset.

    ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize (4096 KiB * 8 on Hopper, and on Blackwell since
    2.12; before and elsewhere :4096:2:16:8), _parseChosenCUDABlasLtWorkspaceSize (1 MiB) and the
    "unified" workspace, which shares cuBLAS' with cuBLASLt from 2.12 to 2.14. Since 2.15 neither is kept.
    """
    large = capability[0] == 9 or (capability[0] >= 10 and torch_version >= (2, 12))
    cublas = 8 * 4096 * KIB if large else 2 * 4096 * KIB + 8 * 16 * KIB
    unified = (2, 12) <= torch_version < (2, 15)
    return Workspaces(cublas, 0 if unified else MIB, kept=torch_version < (2, 15))


def measured_workspaces(total_bytes: int) -> Workspaces:
    """Those of a device on which both threads together were seen to keep `total_bytes`."""
    return Workspaces(total_bytes // THREADS, 0, kept=True)


def workspace_per_call(gpu: Gpu, *, lt: bool = False) -> int:
    """Bytes that one product takes and frees; 0 where workspaces are kept. `lt`: it is cuBLASLt's."""
    workspaces = cublas_workspaces(gpu.capability, gpu.torch_version)
    if workspaces.kept:
        return 0
    return workspaces.cublaslt_bytes if lt else workspaces.cublas_bytes


def calls_cublaslt(
    bias: Tensor, first: Sequence[int], second: Sequence[int], alpha: float = 1, beta: float = 1
) -> bool:
    """Whether addmm of matrices of these shapes adds its bias in cuBLASLt's epilogue.

    ATen/native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt.
    """
    return (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == second[1]
        and alpha == beta == 1
        and min(*first, *second) > 1
    )


def matrix_product(script: Script, operands: Sequence[Tensor], workspace_bytes: int = 0) -> None:
    """mm, addmm, bmm, baddbmm: the output, then contiguous copies of operands cuBLAS cannot read.

    `workspace_bytes`: of the workspace, where it is not kept.

    prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas in ATen/native/cuda/Blas.cpp.
    """
    script.output(0)
    copies = [script.take(size_of(operand)) for operand in operands if not cublas_reads(operand)]
    script.briefly(workspace_bytes, workspace=True)
    script.free(*reversed(copies))


def cublas_reads(matrix: Tensor) -> bool:
    """Whether one of the last two dimensions is dense and the other's stride leaves room for it."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return by_column or by_row or (matrix.dim() == 2 and min(rows, columns) <= 1 and matrix.is_contiguous())


def grouped_product(script: Script, groups: int, dtype: torch.dtype, gpu: Gpu) -> None:
    """aten::_grouped_mm (ATen/native/cuda/GroupMM.cu): CUTLASS takes pointers, strides and sizes of each
    group (60 B) and a workspace of 512 B per multiprocessor; other GPUs and dtypes loop over mm.

    On compute capability 10.x the workspace is 5376 or 5888 B per multiprocessor, by tile shape: the larger.
    """
    script.output(0)
    if dtype == torch.bfloat16 and gpu.capability[0] in (9, 10):
        arguments = script.take(60 * groups)
        script.briefly(gpu.sm_count * (512 if gpu.capability[0] == 9 else 5888))
        script.free(arguments)


def gemm_4bit(
    script: Script,
    input: Tensor,
    weight_shape: Sequence[int],
    block_size: int,
    scales: int | None,
    bias: Tensor | None,
    gpu: Gpu,
) -> None:
    """bitsandbytes::gemm_4bit (bitsandbytes/backends/cuda/ops.py).

    Above a number of rows the weight is dequantized as a whole and multiplied by F.linear; below, a kernel
    of its own reads it as it is. `scales`: how many 8-bit scales there are with double quantization; they
    are dequantized, and copied once more as the offset is added.
    """
    rows = product(input.shape[:-1])
    if reads_4bit_weights(rows, weight_shape, block_size, input.dtype, gpu):
        script.output(0)
        return
    offset_free = scaled = None
    if scales is not None:
        offset_free, scaled = script.take(scales * 4), script.take(scales * 4)
    weight = script.take(product(weight_shape) * input.dtype.itemsize)
    script.output(0)
    columns, inner = weight_shape
    lt = bias is not None and calls_cublaslt(bias, (rows, inner), (inner, columns))
    script.product(lt=lt)
    script.briefly(workspace_per_call(gpu, lt=lt), workspace=True)
    script.free(scaled, offset_free, weight)  # as Python clears the locals of a function


def reads_4bit_weights(
    rows: int, weight_shape: Sequence[int], block_size: int, dtype: torch.dtype, gpu: Gpu
) -> bool:
    """Whether bitsandbytes' own kernel runs, not dequantize and multiply.

    By rows, shape, dtype and GPU it looks into tables of its own, which are asked here. Where they cannot be
    asked (before bitsandbytes 0.50, or after a change of names): below 8 rows.
    """
    if weight_shape[1] % block_size != 0:
        return False
    operators = bitsandbytes_cuda()
    if operators is None:
        return rows < 8
    if rows > operators._gemm_4bit_custom_max_m:
        return False
    properties = gpu.sm_count, *gpu.capability
    with patch.object(operators, "_gpu_dispatch_props", lambda _: properties):
        return operators._gemm_4bit_use_custom_fn(0, dtype, rows, *weight_shape)


def int8_product(script: Script, input: Tensor, rows: int, columns: int) -> None:
    """bitsandbytes::int8_mixed_scaled_mm without outliers: int32 products, dequantized to fp16, converted."""
    products = script.take(rows * columns * 4)
    if input.dtype == torch.float16:
        script.output(0)
        script.free(products)
        return
    half = script.take(rows * columns * 2)
    script.output(0)
    script.free(half, products)
