"""Matrix products on CUDA: cuBLAS' workspaces, operands it cannot read, grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.simulate.kernels.gpu import Gpu
from harness.simulate.kernels.operators import kernel
from harness.simulate.kernels.script import Script, size_of


def call_cublas(script: Script, gpu: Gpu, *, lt: bool = False) -> None:
    """A product by cuBLAS, or (`lt`) by cuBLASLt: the workspace it keeps, or takes and frees."""
    workspaces = gpu.workspaces
    if workspaces.kept:
        script.keep("cublas", workspaces.cublas_bytes)
        script.keep("cublaslt", workspaces.cublaslt_bytes if lt else 0)
    else:
        script.briefly(workspaces.cublaslt_bytes if lt else workspaces.cublas_bytes, workspace=True)


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


@kernel("mm bmm")
def mm(script: Script, self: Tensor, mat2: Tensor, gpu: Gpu) -> None:
    _matrix_product(script, self, mat2, gpu)


@kernel("baddbmm")
def baddbmm(script: Script, batch1: Tensor, batch2: Tensor, gpu: Gpu) -> None:
    _matrix_product(script, batch1, batch2, gpu)


def _given_out(func: Any, args: Any, kwargs: Any) -> Any:
    """addmm.dtype_out writes into a tensor that is there already; no shape function before torch 2.13."""
    return kwargs["out"] if func._schema.overload_name == "dtype_out" else NotImplemented


@kernel("addmm", result=_given_out)
def addmm(
    script: Script, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float, alpha: float, gpu: Gpu
) -> None:
    _matrix_product(script, mat1, mat2, gpu, lt=calls_cublaslt(self, mat1.shape, mat2.shape, alpha, beta))


def _matrix_product(script: Script, first: Tensor, second: Tensor, gpu: Gpu, *, lt: bool = False) -> None:
    """The output, then contiguous copies of operands cuBLAS cannot read.

    prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas in ATen/native/cuda/Blas.cpp.
    """
    script.output(0)
    copies = [script.take(size_of(operand)) for operand in (first, second) if not cublas_reads(operand)]
    call_cublas(script, gpu, lt=lt)
    script.free(*reversed(copies))


def cublas_reads(matrix: Tensor) -> bool:
    """Whether one of the last two dimensions is dense and the other's stride leaves room for it."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return by_column or by_row or (matrix.dim() == 2 and min(rows, columns) <= 1 and matrix.is_contiguous())


def _grouped_result(func: Any, args: Any, kwargs: Any) -> Tensor:
    """torch's shape function allows bf16 only; CUDA loops over the groups in fp16 and fp32 (GroupMM.cu)."""
    dtype = args[0].dtype
    in_bf16 = [
        torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device="meta") for t in args[:2]
    ]
    return torch.empty_like(func(*in_bf16, *args[2:], **kwargs), dtype=dtype)


@kernel("_grouped_mm", result=_grouped_result)
def grouped_mm(script: Script, self: Tensor, offs: Tensor | None, gpu: Gpu) -> None:
    """ATen/native/cuda/GroupMM.cu: CUTLASS takes pointers, strides and sizes of each group (60 B) and a
    workspace of 512 B per multiprocessor; other GPUs and dtypes loop over mm.

    On compute capability 10.x the workspace is 5376 or 5888 B per multiprocessor, by tile shape: the larger.
    """
    script.output(0)
    if self.dtype == torch.bfloat16 and gpu.capability[0] in (9, 10):
        arguments = script.take(60 * (self if offs is None else offs).shape[0])
        script.briefly(gpu.sm_count * (512 if gpu.capability[0] == 9 else 5888))
        script.free(arguments)
