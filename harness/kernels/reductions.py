"""The global-memory staging buffer of CUDA reductions (sum, mean, norm, all, amax ...).

When there are too few outputs to fill the GPU, ATen splits one output over several thread blocks; they
meet in a buffer and count themselves in semaphores, both from the caching allocator.
Source: ATen/native/cuda/Reduce.cuh (setReduceConfig, gpu_reduce_kernel) and ATen/TensorIterator.cpp
(reorder_dimensions, coalesce_dimensions, with_32bit_indexing).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from harness.formula import MAX_VALUES_PER_THREAD, reduction_staging
from harness.kernels.gpu import Gpu
from harness.kernels.script import Script
from harness.units import ceil_div

Dims = int | Sequence[int] | None
"""Dimensions as an operator is given them; None or an empty sequence stands for all."""
MAX_THREADS = 512  # mnt_wrapper
WARP = 32
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Kernel:
    """How a reduction's kernel is instantiated."""

    accumulate_bytes: int
    """sizeof(arg_t): the bytes that each block stages for each output."""
    vector: int = 4
    """input_vec_size: elements one load reads where the input is contiguous along the reduction."""


@dataclass(frozen=True)
class Dim:
    """One dimension of the iterator: its size and the byte strides of output and input."""

    size: int
    output_stride: int
    input_stride: int
    reduced: bool


def reduce(
    script: Script, input: Tensor, dims: Dims, out_dtype: torch.dtype, kernel: Kernel, gpu: Gpu
) -> None:
    """Put into `script` what a reduction of `input` over `dims` takes and frees; its output exists."""
    if input.numel() == 0:
        return
    iterator = iterator_dims(input, dims, out_dtype)
    parts = split_to_32_bit(iterator, input.dtype.itemsize, out_dtype.itemsize)
    accumulator = None
    if len(parts) > 1 and out_dtype.itemsize < kernel.accumulate_bytes and input.dtype == out_dtype:
        # AccumulationBuffer: a 16-bit output cannot hold the partial results of several launches
        outputs = max([1, *(d.size * d.output_stride // out_dtype.itemsize for d in iterator)])
        accumulator = script.take(outputs * kernel.accumulate_bytes)
    for part in parts:
        staging, semaphores = staging_bytes(part, input.dtype.itemsize, kernel, gpu)
        # of the staging area a block writes its own outputs, one in blockDim.x x vectors of what is there
        taken = (script.take(staging, workspace=True), script.take(semaphores))
        script.free(*reversed(taken))
    script.free(accumulator)


def iterator_dims(input: Tensor, dims: Dims, out_dtype: torch.dtype) -> list[Dim]:
    """Dimensions as TensorIterator leaves them: reduced first, then by stride, neighbours merged."""
    rank = input.dim()
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {d % rank for d in dims} if dims else set(range(rank))
    strides, stride = [0] * rank, out_dtype.itemsize
    for d in reversed(range(rank)):  # the output is contiguous, with stride 0 where it was reduced
        if d not in reduced:
            strides[d] = stride
            stride *= input.shape[d]
    size = input.dtype.itemsize
    found = [Dim(input.shape[d], strides[d], input.stride(d) * size, d in reduced) for d in range(rank)]
    return _merged(_sorted(found[::-1]))


def _sorted(dims: list[Dim]) -> list[Dim]:
    # reorder_dimensions: an insertion sort, because the comparison is not a total order
    for i in range(1, len(dims)):
        at = i
        for before in reversed(range(i)):
            order = _compare(dims[before], dims[at])
            if order > 0:
                dims[before], dims[at] = dims[at], dims[before]
                at = before
            elif order < 0:
                break
    return dims


def _compare(first: Dim, second: Dim) -> int:
    if (first.output_stride == 0) != (second.output_stride == 0):
        return 1 if second.output_stride == 0 else -1
    for a, b in ((first.output_stride, second.output_stride), (first.input_stride, second.input_stride)):
        if a == 0 or b == 0:
            continue
        if a != b:
            return -1 if a < b else 1
        if first.size > second.size:
            return 1
    return 0


def _merged(dims: list[Dim]) -> list[Dim]:
    # coalesce_dimensions
    merged: list[Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if last is None or not _can_merge(last, dim):
            merged.append(dim)
        else:
            kept = dim if last.size == 1 else last
            merged[-1] = Dim(last.size * dim.size, kept.output_stride, kept.input_stride, False)
    return merged


def _can_merge(first: Dim, second: Dim) -> bool:
    return 1 in (first.size, second.size) or (
        first.size * first.output_stride == second.output_stride
        and first.size * first.input_stride == second.input_stride
    )


def fits_32_bit(dims: Sequence[Dim], input_bytes: int, output_bytes: int) -> bool:
    """can_use_32bit_indexing: element count and the last byte's offset fit an int."""
    furthest = max(
        output_bytes + sum((d.size - 1) * d.output_stride for d in dims),
        input_bytes + sum((d.size - 1) * d.input_stride for d in dims),
    )
    return prod([d.size for d in dims]) <= INT32_MAX and furthest - min(input_bytes, output_bytes) < INT32_MAX


def split_to_32_bit(dims: list[Dim], input_bytes: int, output_bytes: int) -> list[list[Dim]]:
    """Halve the dimension that reaches furthest, again and again, until an int can index each part."""
    if fits_32_bit(dims, input_bytes, output_bytes):
        return [dims]
    extents = [(dim.size - 1) * max(dim.output_stride, dim.input_stride) for dim in dims]
    at = max(reversed(range(len(dims))), key=extents.__getitem__)
    parts = []
    half = dims[at].size // 2
    for size in (half, dims[at].size - half):
        part = [*dims]
        part[at] = Dim(size, dims[at].output_stride, dims[at].input_stride, dims[at].reduced)
        parts += split_to_32_bit(part, input_bytes, output_bytes)
    return parts


def staging_bytes(dims: Sequence[Dim], input_bytes: int, kernel: Kernel, gpu: Gpu) -> tuple[int, int]:
    """Bytes of the staging buffer and of the semaphores; (0, 0) if one block finishes each output."""
    reduce_dims = sum(d.output_stride == 0 for d in dims)
    outputs = prod([d.size for d in dims if d.output_stride != 0])
    inputs = prod([d.size for d in dims]) // outputs
    inner_reduced = reduce_dims == len(dims) or (
        reduce_dims > 0 and dims[0].input_stride < dims[reduce_dims].input_stride
    )
    if inner_reduced:
        width, height = inputs, outputs
        fastest = dims[0].input_stride if dims else input_bytes
    else:
        width, height, fastest = outputs, inputs, dims[reduce_dims].input_stride
    output_vector = 1
    if fastest == input_bytes:
        if inner_reduced and width >= 128 and reduce_dims == 1:
            width //= kernel.vector
        elif not inner_reduced:
            output_vector = _output_vector(dims, reduce_dims, input_bytes)
            width //= output_vector
    block_width, block_height = _block(width, height, MAX_THREADS // output_vector)

    # Which threads share an output: step_input inputs and step_output outputs are taken at a time.
    step_input, step_output = (block_width, 1) if inner_reduced else (1, block_width)
    split_across_warps = ceil_div(inputs, step_input) >= min(block_height * 16, MAX_VALUES_PER_THREAD)
    if split_across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    values_per_thread = ceil_div(inputs, step_input)
    grid = ceil_div(outputs // output_vector, step_output)
    target_grid = gpu.sm_count * (gpu.threads_per_sm // (block_width * block_height))
    if not (split_across_warps and values_per_thread >= MAX_VALUES_PER_THREAD and grid <= target_grid):
        return 0, 0
    block_bytes = kernel.accumulate_bytes * outputs
    if not inner_reduced:
        block_bytes *= block_width * output_vector
    staging = reduction_staging(inputs, step_input, ceil_div(target_grid, grid), block_bytes)
    return (staging, 4 * grid) if staging else (0, 0)


def _output_vector(dims: Sequence[Dim], reduce_dims: int, input_bytes: int) -> int:
    # get_output_vec_size: the largest of 4, 2, 1 that every other stride and the output dimension allow
    vector = 4
    others = [d.input_stride // input_bytes for i, d in enumerate(dims) if i != reduce_dims]
    for number in (dims[reduce_dims].size, *others):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    # set_block_dimension, with the last power of 2 of what is not too large
    width, height = (1 << (max(n, 1).bit_length() - 1) if n < threads else threads for n in (width, height))
    block_width = min(width, WARP)
    block_height = min(height, threads // block_width)
    return min(width, threads // block_height), block_height
