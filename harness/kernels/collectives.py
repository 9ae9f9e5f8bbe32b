"""FSDP's copies into and out of the buffers of its collectives, and the collectives: what each takes.

Sources are under pytorch's aten/src/ATen/native; the operators are those of torch/distributed/fsdp/
_fully_shard/_fsdp_collectives.py, where no mode sees inside them.
"""

from collections.abc import Sequence
from math import ceil, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from harness.kernels.gpu import Gpu
from harness.kernels.operators import declare, kernel, returns_first, returns_nothing
from harness.kernels.script import Script
from harness.training import is_dense
from harness.units import ceil_div, round_up

BLOCK_BYTES = 128 * 16
"""cuda/TensorShape.cu: BLOCK_SIZE threads copy BYTES_PER_THREAD each."""
ADDRESS_BYTES = 8
BF16_TO_FP32 = (torch.bfloat16, torch.float32)


@kernel("fsdp::split_with_sizes_copy", result=returns_nothing)
def copy_out(
    script: Script,
    all_gather_output: Tensor,
    all_gather_input_split_sizes: Sequence[int],
    dim: int,
    out: Sequence[Tensor],
    gpu: Gpu,
) -> None:
    """cuda/TensorShape.cu, split_with_sizes_copy_out_cuda_contiguous_no_cast: five lists of integers, one
    with an entry a block, go to the device together.
    """
    whole = all_gather_output
    if not is_dense(whole) or any(t.dtype != whole.dtype or not is_dense(t) for t in out):
        return  # copied one by one
    stride = whole.stride(dim) * whole.element_size()
    sizes = [size * stride for size in all_gather_input_split_sizes]
    num_chunks = prod(whole.shape[:dim])
    num_blocks = sum(ceil_div(size, BLOCK_BYTES) for size in sizes)
    most_blocks = gpu.sm_count * gpu.threads_per_sm // 128 * 2
    iterations = ceil_div(num_blocks * num_chunks, most_blocks)
    chunks_per_block = min(ceil(sqrt(iterations)), num_chunks)
    per_block = BLOCK_BYTES * ceil_div(iterations, chunks_per_block)
    blocks = sum(ceil_div(size, per_block) for size in sizes)
    script.briefly(ADDRESS_BYTES * (4 * len(sizes) + 1 + blocks))


# chunk_cat_mixed_dtype since 2.15: the same for gradients of one dtype
@kernel("fsdp::chunk_cat fsdp::chunk_cat_mixed_dtype", result=returns_nothing)
def copy_in(script: Script, tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """cuda/TensorShape.cu, get_chunk_cat_metadata: seven lists of integers, one with an entry a block. Of
    other dtypes than bf16 to fp32 it is native/TensorShape.cpp, _pad_chunk: filled-up copies of what the
    ranks do not divide.
    """
    dtype = tensors[0].dtype
    if all(map(is_dense, tensors)) and (dtype == out.dtype or (dtype, out.dtype) == BF16_TO_FP32):
        sizes = [_padded(t, dim, num_chunks) // num_chunks * out.element_size() for t in tensors]
        blocks = sum(ceil_div(size, BLOCK_BYTES) for size in sizes)
        script.briefly(ADDRESS_BYTES * (6 * len(sizes) + 2 + blocks))
        return
    uneven = [t for t in tensors if t.shape[dim] % num_chunks]
    script.free(*[script.take(_padded(t, dim, num_chunks) * t.element_size()) for t in uneven])


def _padded(tensor: Tensor, dim: int, num_chunks: int) -> int:
    """Elements of `tensor` when `dim` is filled up to a multiple of `num_chunks`."""
    shape = [*tensor.shape]
    shape[dim] = round_up(shape[dim], num_chunks)
    return prod(shape)


def _waited_for_when_used(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A collective's result, which operators wait for: its shape function would make a tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


declare(
    "_c10d_functional::_wrap_tensor_autograd",
    nothing="another view of a collective's result",
    launches=False,
    result=_waited_for_when_used,
)


declare("_c10d_functional::wait_tensor", nothing="waits", launches=False, result=returns_first)
declare(
    "fsdp::record_grad_output_stream", nothing="does nothing on CUDA", launches=False, result=returns_nothing
)
declare(
    "fsdp::all_gather_copy_in",
    nothing="copies a list into this rank's part of the output, by _foreach_copy_, and returns both",
    unread=1,
    given_back=1,
)
# torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: NCCL's own buffers are not of the caching allocator.
COLLECTIVES = "NCCL reads and writes tensors that are there"
declare(
    """
    c10d::_allgather_base_ c10d::_reduce_scatter_base_ c10d::allreduce_ c10d::broadcast_
    _c10d_functional::all_reduce _c10d_functional::all_gather_into_tensor
    _c10d_functional::reduce_scatter_tensor
    """,
    nothing=COLLECTIVES,
    launches=False,
)
