"""What sorting and scanning on CUDA take from the caching allocator.

CUB asks its caller for one scratch buffer; ATen/cuda/cub.cuh gives it one from the caching allocator. Its
size follows from cub's tuning tables: how many elements one thread block handles ("tile"), per architecture.
Files and lines are those of CCCL 3.0.1, under cub/cub, which CUDA 13.0 brings: threads times items a thread,
and of 8 bytes half as many items as the tables say for 4 (util_arch.cuh, 141-159).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.simulate.kernels.gpu import Gpu
from harness.simulate.kernels.operators import kernel
from harness.simulate.kernels.reductions import Kernel, reduce
from harness.simulate.kernels.script import Script, ceil_div, round_up, size_of

ALIGNMENT = 256  # util_temporary_storage.cuh, 80: each part of a scratch buffer starts at a multiple of it
INDEX_BYTES = 8
RADIX_BITS = 8
SMALL_SORT = 4096  # native/cuda/Sort.cpp, should_use_small_sort: one block sorts that many, without scratch
SINGLE_TILE = (
    256 * 9
)  # SingleTilePolicy: 256 threads of 19 (device/dispatch/tuning/tuning_radix_sort.cuh, 957)
ROWS_PER_THREAD = 10  # NROWS_PER_THREAD in EmbeddingBackwardKernel.cu
EMBEDDING_WITHOUT_SORT = 3072


def scratch(*parts_bytes: int) -> int:
    """cub's AliasTemporaries: parts rounded up to 256 B, and 255 B to align the first."""
    return sum(round_up(part, ALIGNMENT) for part in parts_bytes) + ALIGNMENT - 1


def radix_sort_scratch(count: int, bits: int, gpu: Gpu) -> int:
    """DeviceRadixSort::SortPairs of 8-byte keys with 8-byte values on the lowest `bits` bits.

    Onesweep (device/dispatch/dispatch_radix_sort.cuh, 480-491): a histogram of 256 64-bit bins per pass, one
    row of 256 32-bit counters per tile, for several passes the second half of the two double buffers, one
    counter per pass. Tiles: device/dispatch/tuning/tuning_radix_sort.cuh, OnesweepPolicy: 895 for Hopper and
    later (384 threads of 24 items), 792 for Ampere and Ada (384 of 21), 695 for Volta and Turing (256 of 23).
    """
    if count <= SINGLE_TILE:
        return 1
    tile = 384 * 12 if gpu.capability >= (9, 0) else 384 * 10 if gpu.capability >= (8, 0) else 256 * 11
    passes = ceil_div(bits, RADIX_BITS)
    bins = 2**RADIX_BITS
    tiles = ceil_div(count, tile)
    buffer = count * 8 if passes > 1 else 0
    return scratch(passes * bins * 8, tiles * bins * 4, buffer, buffer, passes * 4)


def scan_scratch(count: int, item_bytes: int, tile: int | None = None) -> int:
    """DeviceScan: one state per tile and 32 of padding (agent/single_pass_scan_operators.cuh, 626).

    A state is a value and a flag in one word of twice the item's size; a second part of a byte is aligned up.
    Tile: DefaultPolicy, 128 threads of 15 items, on every GPU, because torch's sum is a functor of its own
    (device/dispatch/tuning/tuning_scan.cuh, 478; ATen/cuda/cub.cuh, SumOp).
    """
    tiles = ceil_div(count, tile or 128 * max(1, min(15 * 4 // item_bytes, 15 * 2)))
    return scratch((tiles + 32) * 2 * item_bytes, 1)


def unique_scratch(count: int, gpu: Gpu) -> int:
    """DeviceSelect::UniqueByKey of 8-byte keys: a scan with tiles of its own.

    device/dispatch/tuning/tuning_unique_by_key.cuh: 281 and 291 for compute capability 8.0, 493 and 503 for
    9.0, 734 and 746 for 10.0 and later, with values of 4 and of 8 bytes; 834 and 843 for Turing, 8.6 and 8.9.
    The values are numbers of rows, counted as int (native/cuda/EmbeddingBackwardKernel.cu, unique_by_key)
    until 2.12. That they have 64 bits since is inferred from the sizes that 2.13 asks for.
    """
    wide = gpu.torch.numbers_rows_in_64_bits
    if gpu.capability < (8, 0) or (8, 6) <= gpu.capability < (9, 0):
        tile = 64 * 5
    elif gpu.capability < (9, 0):
        tile = 192 * 7 if wide else 256 * 7
    elif wide:
        tile = 448 * 11
    else:
        tile = 640 * 7 if gpu.capability < (10, 0) else 384 * 10
    return scan_scratch(count, 8, tile)


@kernel("sort")
def sort(script: Script, self: Tensor, dim: int, gpu: Gpu) -> None:
    """ATen/native/cuda/Sort.cpp: values, indices, and the positions 0, 1, 2 ... that it sorts.

    Past 4096 elements: of one dimension of 64-bit numbers.
    """
    script.output(0, 1)
    count = self.shape[dim] if self.dim() else 1
    positions = script.take(count * INDEX_BYTES)
    if count > SMALL_SORT:
        script.briefly(radix_sort_scratch(count, 64, gpu))
    script.free(positions)


@kernel("cumsum")
def cumsum(script: Script, self: Tensor, dim: int, outputs: Sequence[Any]) -> None:
    """ATen/native/ReduceOps.cpp converts, ScanKernels.cpp and ScanUtils.cuh scan.

    Only a scan over everything goes to cub; others use a kernel without scratch.
    """
    dtype = outputs[0].dtype
    script.output(0)
    kept_as_it_is = self.dtype == dtype and self.is_contiguous()
    converted = None if kept_as_it_is else script.take(size_of(self, dtype))
    if self.dim() and self.numel() == self.shape[dim]:
        script.briefly(scan_scratch(self.numel(), dtype.itemsize))
    script.free(converted)


@kernel("embedding_dense_backward")
def embedding_backward(
    script: Script, grad_output: Tensor, indices: Tensor, num_weights: int, gpu: Gpu
) -> None:
    """ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu.

    Past 3072 indices: the indices are sorted, equal ones cut into pieces of at most 10, and each piece is
    summed in fp32 into a row of its own. There may be as many pieces as distinct indices plus a tenth of all
    indices: the kernel makes room for that many rows, whatever the indices are.
    """
    copies = [script.take(size_of(t)) for t in (grad_output, indices) if not t.is_contiguous()]
    count = indices.numel()
    if count <= EMBEDDING_WITHOUT_SORT:
        script.output(0)
        script.free(*reversed(copies))
        return
    list_bytes = count * indices.dtype.itemsize
    sorted_indices, origins, positions = (script.take(list_bytes) for _ in range(3))
    used_bits = gpu.torch.sorts_embedding_indices_by_used_bits
    bits = num_weights.bit_length() if used_bits else 8 * indices.dtype.itemsize
    script.briefly(radix_sort_scratch(count, bits, gpu))
    script.free(positions)
    script.output(0)

    segments = min(count, num_weights)
    pieces = count // ROWS_PER_THREAD + segments
    starts, segment_count, ignored = (script.take(n) for n in (list_bytes, INDEX_BYTES, list_bytes))
    script.briefly(unique_scratch(count, gpu))
    script.free(ignored)
    piece_counts, piece_offsets = (script.take(segments * INDEX_BYTES) for _ in range(2))
    script.briefly(scan_scratch(segments, INDEX_BYTES))
    piece_count = script.take(INDEX_BYTES)
    piece_starts = script.take(pieces * INDEX_BYTES)
    sums = script.take(pieces * grad_output.shape[-1] * 4)
    script.free(sums, piece_starts, piece_count, piece_offsets, piece_counts, segment_count, starts)
    script.free(origins, sorted_indices, *reversed(copies))


@kernel("index_put_", scatters=True)
@kernel("_index_put_impl_ index_put")
def index_put(
    script: Script,
    self: Tensor,
    indices: Sequence[Tensor | None],
    accumulate: bool,
    outputs: Sequence[Any],
    gpu: Gpu,
    unsafe: bool = False,
) -> None:
    """To accumulate with one index over rows, the index is sorted with its positions.

    ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel. Unless `unsafe` its bounds are looked at first.
    """
    if outputs[0] is not self:
        script.output(0)
    given = [i for i in indices if i is not None]
    if not accumulate or len(given) != 1 or given[0].dtype == torch.bool:
        return
    (index,) = given
    if not unsafe:
        _bounds(script, index, gpu)
    count = index.numel()
    list_bytes = count * INDEX_BYTES
    wrapped, linear = script.take(list_bytes), script.take(list_bytes)
    script.free(wrapped)
    origins, sorted_indices, positions = (script.take(list_bytes) for _ in range(3))
    script.briefly(radix_sort_scratch(count, self.shape[0].bit_length(), gpu))
    script.free(positions, sorted_indices, origins, linear)


def _bounds(script: Script, index: Tensor, gpu: Gpu) -> None:
    if gpu.torch.finds_both_bounds_at_once:
        smallest, largest = script.take(INDEX_BYTES), script.take(INDEX_BYTES)
        reduce(script, index, (), index.dtype, Kernel(2 * INDEX_BYTES), gpu)
        script.briefly(1)
        script.briefly(1)
        script.free(largest, smallest)
        return
    for _ in range(2):
        bound = script.take(INDEX_BYTES)
        reduce(script, index, (), index.dtype, Kernel(INDEX_BYTES), gpu)
        script.briefly(1)
        script.free(bound)
