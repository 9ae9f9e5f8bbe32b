"""Matrix products on CUDA: cuBLAS' workspaces, operands it cannot read, outer and grouped products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.kernels.gpu import Gpu
from harness.kernels.operators import kernel
from harness.kernels.script import Script, size_of
from harness.units import round_up

TMA_DESCRIPTOR_BYTES = 128  # sizeof(CUtensorMap)


def call_cublas(script: Script, gpu: Gpu, *, lt: bool = False) -> None:
    """The workspace of a product by cuBLAS, or (`lt`) by cuBLASLt: kept by the library, or freed again."""
    workspaces = gpu.workspaces
    if workspaces.kept:
        script.keep("cublas", workspaces.cublas_bytes)
        script.keep("cublaslt", workspaces.cublaslt_bytes if lt else 0)
    else:
        script.briefly(workspaces.cublaslt_bytes if lt else workspaces.cublas_bytes, workspace=True)


def calls_cublaslt(
    bias: Tensor, first: Sequence[int], second: Sequence[int], gpu: Gpu, *, beta: float = 1
) -> bool:
    """Whether addmm of matrices of these shapes adds its bias in cuBLASLt: one row, or a whole matrix.

    ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl.
    """
    rows, inner, columns = *first, second[1]
    if inner == 1 or columns == 1:
        return False
    if bias.dim() and bias.numel() == bias.shape[-1] == columns and bias.is_contiguous():
        return beta == 1
    whole = bias.shape == (rows, columns) and bias.dtype in (torch.float16, torch.bfloat16)
    return gpu.torch.adds_matrices_in_cublaslt and beta != 0 and whole and _is_dense(columns, *bias.stride())


@kernel("mm")
def mm(script: Script, self: Tensor, mat2: Tensor, gpu: Gpu) -> None:
    _matrix_product(script, self, mat2, gpu)


@kernel("bmm")
def bmm(script: Script, self: Tensor, mat2: Tensor, gpu: Gpu, out_dtype: torch.dtype | None = None) -> None:
    """With an inner size of 1, as of RoPE's frequencies and positions, torch may run a Triton kernel of its
    own instead of cuBLAS.

    torch/_native/ops/bmm_outer_product/triton_impl.py: it reads any strides. bmm.dtype has no such kernel.
    """
    outer = self.shape[2] == 1 and not self.is_complex() and out_dtype is None
    if outer and gpu.multiplies_outer_products_in_triton:
        script.output(0)
    else:
        _matrix_product(script, self, mat2, gpu)


@kernel("baddbmm")
def baddbmm(script: Script, batch1: Tensor, batch2: Tensor, gpu: Gpu) -> None:
    _matrix_product(script, batch1, batch2, gpu)


def _given_out(func: Any, args: Any, kwargs: Any) -> Any:
    """addmm.dtype_out writes into a tensor that is there already; no shape function before torch 2.13."""
    return kwargs["out"] if func._schema.overload_name == "dtype_out" else NotImplemented


@kernel("addmm addmm_", result=_given_out)
def addmm(script: Script, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float, gpu: Gpu) -> None:
    _matrix_product(script, mat1, mat2, gpu, lt=calls_cublaslt(self, mat1.shape, mat2.shape, gpu, beta=beta))


@kernel("_scaled_mm")
def scaled_mm(script: Script, gpu: Gpu) -> None:
    """Products of fp8 factors with a scale each, by cuBLASLt. ATen/native/cuda/ScaledBlas.cpp."""
    script.output(0)
    call_cublas(script, gpu, lt=True)


@kernel("dot")
def dot(script: Script, gpu: Gpu) -> None:
    """ATen/native/cuda/Blas.cpp, dot_cuda."""
    script.output(0)
    call_cublas(script, gpu)


def _matrix_product(script: Script, first: Tensor, second: Tensor, gpu: Gpu, *, lt: bool = False) -> None:
    """The output, then contiguous copies of operands cuBLAS cannot read.

    cublasCommonArgs and bmm_out_cuda_impl in ATen/native/cuda/Blas.cpp. cuBLAS writes by columns, so an
    output by rows is the product of both transposed, in the other order; a batch of columns is as it is.
    """
    script.output(0)
    by_columns = second.dim() == 3 and second.shape[2] == 1
    operands = (first, second) if by_columns else (second, first)
    copies = [script.take(size_of(operand)) for operand in operands if not cublas_reads(operand)]
    call_cublas(script, gpu, lt=lt)
    script.free(*reversed(copies))


def cublas_reads(matrix: Tensor) -> bool:
    """Whether one of the last two dimensions is dense and the other's stride leaves room for it."""
    rows, columns = matrix.shape[-2:]
    by_row, by_column = matrix.stride()[-2:]
    if _is_dense(columns, by_row, by_column) or _is_dense(rows, by_column, by_row):
        return True
    return matrix.dim() == 2 and min(rows, columns) <= 1 and matrix.is_contiguous()


def _is_dense(length: int, stride: int, step: int) -> bool:
    """Whether rows (or columns) of this length, a stride apart, have their elements side by side."""
    return step == 1 and stride >= max(1, length)


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
