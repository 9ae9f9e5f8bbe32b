"""Differences between releases of PyTorch that decide about memory or time, each with a name. No other module
compares versions."""

import re
from typing import Literal, NamedTuple

from harness.errors import InputError

FreeBlockOrder = Literal["address", "block_counter", "segment_counter"]
CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 2**10 + 8 * 16 * 2**10
HOPPERS_CUBLAS_WORKSPACE_BYTES = 8 * 4096 * 2**10
"""The workspace that PyTorch gives to cuBLAS in each thread that multiplies matrices, where
CUBLAS_WORKSPACE_CONFIG is not set: before Hopper, and on Hopper (ATen/cuda/CublasHandlePool.cpp,
parseChosenWorkspaceSize)."""


class _Difference:
    """An attribute of TorchRelease: whether the release is `since` or later, and before `until`."""

    def __init__(self, since: tuple[int, int] = (0, 0), *, until: tuple[int, int] | None = None) -> None:
        self._since, self._until = since, until

    def __get__(self, release: tuple[int, int], owner: type) -> bool:
        return self._since <= release and (self._until is None or release < self._until)


class TorchRelease(NamedTuple):
    """A release of torch, from 2.11 to 2.15. Paths of sources below are in aten/src/ATen, unless they begin
    with c10 or torch."""

    major: int
    minor: int

    @classmethod
    def of(cls, version: str) -> "TorchRelease":
        """The release (2, 13) of the version "2.13.0+cu130". Raises InputError for other texts."""
        match = re.match(r"(\d+)\.(\d+)", version)
        if not match:
            raise InputError(f"torch version {version!r} does not start like 2.13. Give one that does.")
        return cls(int(match[1]), int(match[2]))

    @property
    def cudnn_version(self) -> int:
        """The version of cuDNN that the CUDA 13 wheels require, as cudnnGetVersion() returns it."""
        known = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}
        return known[max((release for release in known if release <= self), default=min(known))]

    @property
    def free_block_order(self) -> FreeBlockOrder:
        """How the caching allocator ranks equally large free blocks of a stream; the first is taken first.

        c10/cuda/CUDACachingAllocator.cpp: by address; in 2.12 by a number each block gets when it is made
        (pytorch pull request 178362); since 2.13 by a number that its segment got, then by address (183591).
        """
        if self < (2, 12):
            return "address"
        return "block_counter" if self == (2, 12) else "segment_counter"

    # cuda/CublasHandlePool.cpp
    keeps_cublas_workspaces = _Difference(until=(2, 15))
    """A workspace lives as long as the process. Otherwise every call takes one and frees it."""
    shares_cublas_workspaces = _Difference((2, 12), until=(2, 15))
    """cuBLASLt uses cuBLAS' workspace, which is called the unified one."""
    blackwell_has_hoppers_workspace = _Difference((2, 12))
    """Compute capabilities above 9 get the workspace of Hopper."""

    adds_matrices_in_cublaslt = _Difference((2, 15))
    """native/cuda/Blas.cpp, addmm: cuBLASLt adds a whole matrix in 16 bit; before, only a bias of one row."""
    multiplies_outer_products_in_triton = _Difference((2, 13))
    """torch/_native/ops/bmm_outer_product (pytorch pull request 179082): bmm of inner size 1 is a Triton
    kernel and calls no cuBLAS."""

    # native/transformers/cuda/sdp_utils.cpp, by the names of its checks
    every_gpu_10_prefers_cudnn = _Difference((2, 13))
    """check_prefer_cudnn_attention: every GPU of capability 10.x prefers cuDNN; before, 10.0 and 10.3."""
    checks_cudnn_dropout = _Difference((2, 12))
    """check_cudnn_dropout: refuses probabilities that cuDNN, with a resolution of 1/16, would round."""
    checks_cudnn_grid = _Difference((2, 13))
    """check_cudnn_tensor_shapes: refuses more rows or heads than cuDNN's launch grid can have."""
    checks_flash_grid = _Difference((2, 15))
    """check_flash_attention_grid_size: refuses more rows or heads than the launch grid can have."""
    knows_cudnn_head_dim_256 = _Difference((2, 14))
    """check_cudnn_tensor_shapes, check_cudnn_d256_bprop_head_dim: heads of 256, by cuDNN's version."""
    refuses_single_queries_to_cudnn = _Difference((2, 14))
    """check_cudnn_tensor_shapes: refuses one query on compute capability 10.x with some versions of cuDNN."""
    efficient_attention_groups_heads = _Difference((2, 14))
    """check_batch_size_and_num_heads_dense: efficient attention takes grouped heads, and every kernel
    broadcasts a single key-value head."""

    seeds_efficient_attention_always = _Difference(until=(2, 14))
    """native/transformers/cuda/attention.cu, _efficient_attention_forward: seeds without dropout too."""
    cudnn_backward_by_keys_alone = _Difference((2, 15))
    """Which kernel of cuDNN 9.26 runs on Blackwell depends on the number of keys, not of queries."""
    numbers_rows_in_64_bits = _Difference((2, 13))
    """The backward of an embedding numbers rows in 64 bits instead of 32: see unique_scratch in
    harness/kernels/sorting.py."""
    sorts_embedding_indices_by_used_bits = _Difference((2, 13))
    """native/cuda/Embedding.cu, embedding_dense_backward_cuda: sorts by the bits that an index can have."""
    finds_both_bounds_at_once = _Difference((2, 13))
    """native/cuda/Indexing.cu, index_put_with_sort_kernel: takes aminmax of the index, not min and max."""
    packs_norms_of_lists = _Difference((2, 15))
    """native/cuda/ForeachReduceOp.cu: has partial results for each tensor's own chunks, not for as many as
    the largest has."""
    fsdp_divides_integers = _Difference((2, 12))
    """torch/distributed/fsdp/_fully_shard/_fsdp_param.py: weights of integers can be divided; before, every
    part required a gradient at first, which integers cannot."""
    autocasts_rms_norm = _Difference((2, 12))
    """autocast_mode.h, AT_FORALL_FP32: autocast runs rms_norm in fp32."""
