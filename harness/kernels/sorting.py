"""What sorting, scanning and indexing on CUDA take from the caching allocator.

CUB asks its caller for one scratch buffer (formula/scratch.py); ATen/cuda/cub.cuh gives it one from the
caching allocator. Its size follows from cub's tuning tables: how many elements one thread block handles.
Files and lines are those of CCCL 3.0.1, under cub/cub, which CUDA 13.0 brings: threads times items a thread,
and of 8 bytes half as many items as the tables say for 4 (util_arch.cuh, 141-159).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from harness.formula import (
    at_most,
    count_scratch,
    embedding_pieces,
    radix_sort_rows_scratch,
    radix_sort_scratch,
    scan_scratch,
    scan_scratch_at_most,
    select_scratch,
)
from harness.kernels.gpu import Gpu
from harness.kernels.operators import kernel
from harness.kernels.reductions import Kernel, reduce
from harness.kernels.script import Script, size_of

INDEX_BYTES = 8
SMALL_SORT = 4096  # native/cuda/Sort.cpp, should_use_small_sort: one block sorts that many, without scratch
EMBEDDING_WITHOUT_SORT = 3072


def sort_tile(gpu: Gpu) -> int:
    """Elements of 8 bytes that one thread block sorts: device/dispatch/tuning/tuning_radix_sort.cuh,
    OnesweepPolicy: 895 for Hopper and later (384 threads of 24 items), 792 for Ampere and Ada (384 of 21),
    695 for Volta and Turing (256 of 23)."""
    return 384 * 12 if gpu.capability >= (9, 0) else 384 * 10 if gpu.capability >= (8, 0) else 256 * 11


def scan_tile(item_bytes: int) -> int:
    """Items that one thread block adds up: DefaultPolicy, 128 threads of 15 items, on every GPU, because
    torch's sum is a functor of its own (device/dispatch/tuning/tuning_scan.cuh, 478; ATen/cuda/cub.cuh,
    SumOp)."""
    return 128 * max(1, min(15 * 4 // item_bytes, 15 * 2))


def unique_scratch(count: int, gpu: Gpu) -> int:
    """Scratch bytes of DeviceSelect::UniqueByKey for `count` 8-byte keys: a scan with tiles of its own.

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
        script.briefly(radix_sort_scratch(count, 64, sort_tile(gpu)))
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
        script.briefly(scan_scratch(self.numel(), dtype.itemsize, scan_tile(dtype.itemsize)))
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
    room = (
        radix_sort_rows_scratch(count, num_weights, sort_tile(gpu))
        if used_bits
        else radix_sort_scratch(count, 8 * indices.dtype.itemsize, sort_tile(gpu))
    )
    script.briefly(room)
    script.free(positions)
    script.output(0)

    counts_bytes = at_most(count, num_weights, INDEX_BYTES)
    starts, segment_count, ignored = (script.take(n) for n in (list_bytes, INDEX_BYTES, list_bytes))
    script.briefly(unique_scratch(count, gpu))
    script.free(ignored)
    piece_counts, piece_offsets = (script.take(counts_bytes) for _ in range(2))
    script.briefly(scan_scratch_at_most(count, num_weights, INDEX_BYTES, scan_tile(INDEX_BYTES)))
    piece_count = script.take(INDEX_BYTES)
    piece_starts = script.take(embedding_pieces(count, num_weights, INDEX_BYTES))
    sums = script.take(embedding_pieces(count, num_weights, grad_output.shape[-1] * 4))
    script.free(sums, piece_starts, piece_count, piece_offsets, piece_counts, segment_count, starts)
    script.free(origins, sorted_indices, *reversed(copies))


def select_tile(gpu: Gpu) -> int:
    """Positions that one thread block of DeviceSelect::Flagged looks at, as the sizes that it asks for say on
    the virtual GPU (CUDA 13.0)."""
    if gpu.capability >= (10, 0):
        return 7040
    return {(9, 0): 8448, (8, 0): 4608}.get(gpu.capability, 1280)


def positions_of(script: Script, mask: Tensor, gpu: Gpu) -> int | None:
    """The positions where `mask` is true, native/cuda/Nonzero.cu: their number, then an int64 for each one
    and each dimension of `mask`. Returns the handle of the positions, which the caller frees. Every element
    counts as true where the values are not known (simulate/cuda/known_values.py)."""
    count, blocks = mask.numel(), 5 * gpu.sm_count * (gpu.threads_per_sm // 256)
    values: Tensor | None = getattr(mask, "known_values", None)
    true = count if values is None else int(values.sum())
    copy = None if mask.is_contiguous() else script.take(size_of(mask))
    number = script.take(4)
    script.briefly(count_scratch(count, blocks))
    positions = script.take(true * mask.dim() * INDEX_BYTES)
    script.briefly(select_scratch(count, select_tile(gpu)))
    script.free(number, copy)
    return positions


@kernel("masked_scatter")
def masked_scatter(script: Script, self: Tensor, mask: Tensor) -> None:
    """native/cuda/IndexKernel.cpp, masked_scatter__cuda: for each place, as an int64, how many true values of
    the mask (expanded to the shape of `self`) come before it."""
    script.output(0)
    before = script.take(self.numel() * INDEX_BYTES)
    whole = mask.expand(self.shape)
    copy = None if whole.is_contiguous() else script.take(size_of(whole))
    script.briefly(scan_scratch(self.numel(), INDEX_BYTES, scan_tile(INDEX_BYTES)))
    script.free(copy, before)


@kernel("masked_scatter_backward")
def masked_scatter_backward(script: Script, grad_output: Tensor, mask: Tensor, gpu: Gpu) -> None:
    """native/TensorAdvancedIndexing.cpp: masked_select, which indexes with the mask."""
    values = getattr(mask, "known_values", None)
    mask = mask.expand(grad_output.shape)
    if values is not None:
        mask.known_values = values.expand(grad_output.shape)  # type: ignore[attr-defined]
    positions = positions_of(script, mask, gpu)
    script.output(0)
    script.free(positions)


@kernel("repeat_interleave")
def repeat_interleave(script: Script, repeats: Tensor) -> None:
    """native/Repeat.h, repeat_interleave_common: where each repeated value begins, and the check that no
    count is negative."""
    count = repeats.numel()
    begins = script.take(count * INDEX_BYTES)
    script.briefly(scan_scratch(count, INDEX_BYTES, scan_tile(INDEX_BYTES)))
    positive, all_positive = script.take(count), script.take(1)
    script.free(all_positive, positive)
    script.output(0)
    script.free(begins)


@kernel("index", looks_up=True)
def index(script: Script, indices: Sequence[Tensor | None], gpu: Gpu) -> None:
    """native/TensorAdvancedIndexing.cpp, AdvancedIndex: several indices must have the same strides. A mask is
    the positions where it is true."""
    given = [i for i in indices if i is not None]
    copies: list[int | None] = []
    if len(given) == 1 and given[0].dtype == torch.bool:
        copies = [positions_of(script, given[0], gpu)]
    elif len(given) > 1:
        shape = torch.broadcast_shapes(*(i.shape for i in given))
        expanded = [i.expand(shape) for i in given]
        if len({i.stride() for i in expanded}) > 1:
            copies = [script.take(size_of(i)) for i in expanded if not i.is_contiguous()]
    script.output(0)
    script.free(*copies)


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
    """With `accumulate`, and an index or a mask for the first dimensions, the linear indices are sorted with
    their positions.

    ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel. Unless `unsafe`, bounds are checked first.
    """
    if outputs[0] is not self:
        script.output(0)
    given = [i for i in indices if i is not None]
    if not accumulate or len({i.shape for i in given}) != 1 or len(given) != len(indices):
        return
    index = given[0]
    count, masks = index.numel(), index.dtype == torch.bool
    columns = positions_of(script, index, gpu) if masks else None
    indexed = index.dim() if masks else len(given)
    for checked in () if unsafe else given:
        _bounds(script, checked, gpu)
    list_bytes = count * INDEX_BYTES
    wrapped, linear = script.take(list_bytes), script.take(list_bytes)
    script.free(wrapped)
    for _ in range(indexed - 1):  # the next column, times its stride, is added
        wrapped, times_stride = script.take(list_bytes), script.take(list_bytes)
        script.free(wrapped, times_stride)
    script.free(columns)
    origins, sorted_indices, positions = (script.take(list_bytes) for _ in range(3))
    script.briefly(radix_sort_rows_scratch(count, prod(self.shape[:indexed]), sort_tile(gpu)))
    script.free(positions, sorted_indices, origins, linear)


def _bounds(script: Script, index: Tensor, gpu: Gpu) -> None:
    """The check of an index: its smallest and its largest value are found and compared with the bounds."""
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
