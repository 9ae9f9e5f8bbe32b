"""Matrix products on CUDA: cuBLAS' workspaces, operands it cannot read, grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.simulate.kernels.gpu import Gpu
from harness.simulate.kernels.operators import kernel
from harness.simulate.kernels.script import Script, round_up, size_of

TMA_DESCRIPTOR_BYTES = 128  # sizeof(CUtensorMap)


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
    """ATen/native/cuda/GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100: CUTLASS takes three pointers (of an
    even number of groups), three strides and three sizes of each group, and a workspace; other GPUs and
    dtypes loop over mm.

    The workspace has TMA descriptors of 128 B for each multiprocessor (get_workspace_size of CUTLASS'
    collectives, include/cutlass). Hopper: of A, of B, and of D for two warp groups
    (gemm/collective/sm90_mma_array_tma_gmma_ss_warpspecialized.hpp,
    epilogue/collective/sm90_epilogue_array_tma_warpspecialized.hpp). Compute capability 10.x: several each,
    as many as its pipelines have stages (sm100_mma_array_warpspecialized.hpp, NumTmaDescriptorsPerSm). Those
    follow from what shared memory is left and are not worked out here: 42 or 46 in all, by tile shape, were
    seen in torch's host code, and the larger is taken.
    """
    script.output(0)
    if self.dtype == torch.bfloat16 and gpu.capability[0] in (9, 10):
        groups = (self if offs is None else offs).shape[0]
        arguments = script.take(3 * 8 * round_up(groups, 2) + (3 * 8 + 3 * 4) * groups)
        script.briefly(gpu.sm_count * TMA_DESCRIPTOR_BYTES * (4 if gpu.capability[0] == 9 else 46))
        script.free(arguments)
