"""Releases of PyTorch: each difference that decides about memory has its name here; nothing else compares."""

import re
from typing import Literal, NamedTuple

from harness.errors import InputError

FreeBlockOrder = Literal["address", "block_counter", "segment_counter"]
CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 2**10 + 8 * 16 * 2**10
HOPPERS_CUBLAS_WORKSPACE_BYTES = 8 * 4096 * 2**10
"""What PyTorch gives to cuBLAS in each thread that multiplies, CUBLAS_WORKSPACE_CONFIG unset
(ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize)."""


class _Difference:
    """Whether a release is one of those from `since` on and before `until`."""

    def __init__(self, since: tuple[int, int] = (0, 0), *, until: tuple[int, int] | None = None) -> None:
        self._since, self._until = since, until

    def __get__(self, release: tuple[int, int], owner: type) -> bool:
        return self._since <= release and (self._until is None or release < self._until)


class TorchRelease(NamedTuple):
    """A release of torch. Sources are under aten/src/ATen, unless they begin with c10.

    From 2.11, which the machine for the hardware profiles has, to 2.15.
    """

    major: int
    minor: int

    @classmethod
    def of(cls, version: str) -> "TorchRelease":
        """(2, 13) of "2.13.0+cu130". Raises InputError."""
        match = re.match(r"(\d+)\.(\d+)", version)
        if not match:
            raise InputError(f"torch version {version!r} does not start like 2.13. Give one that does.")
        return cls(int(match[1]), int(match[2]))

    @property
    def cudnn_version(self) -> int:
        """nvidia-cudnn-cu13 as the CUDA 13 wheels pin it, as cudnnGetVersion() returns it."""
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
    """For the life of the process. Otherwise every call takes one and frees it."""
    shares_cublas_workspaces = _Difference((2, 12), until=(2, 15))
    """The "unified" workspace: cuBLASLt uses that of cuBLAS."""
    blackwell_has_hoppers_workspace = _Difference((2, 12))

    adds_matrices_in_cublaslt = _Difference((2, 15))
    """native/cuda/Blas.cpp, addmm: in 16 bits. Before, only a bias of one row."""
    multiplies_outer_products_in_triton = _Difference((2, 13))
    """torch/_native/ops/bmm_outer_product (pytorch pull request 179082): bmm of inner size 1 calls no
    cuBLAS."""

    # native/transformers/cuda/sdp_utils.cpp, by the names of its checks
    every_gpu_10_prefers_cudnn = _Difference((2, 13))
    """check_prefer_cudnn_attention: before, 10.0 and 10.3 of compute capability 10.x."""
    checks_cudnn_dropout = _Difference((2, 12))
    """check_cudnn_dropout: cuDNN's probability has a resolution of 1/16."""
    checks_cudnn_grid = _Difference((2, 13))
    """check_cudnn_tensor_shapes: batch and heads are dimensions of the launch grid."""
    checks_flash_grid = _Difference((2, 15))
    """check_flash_attention_grid_size: the same."""
    knows_cudnn_head_dim_256 = _Difference((2, 14))
    """check_cudnn_tensor_shapes by cuDNN's version, and check_cudnn_d256_bprop_head_dim."""
    refuses_single_queries_to_cudnn = _Difference((2, 14))
    """check_cudnn_tensor_shapes: on compute capability 10.x, with some versions of cuDNN."""
    efficient_attention_groups_heads = _Difference((2, 14))
    """check_batch_size_and_num_heads_dense; one key-value head also broadcasts, in every kernel."""

    seeds_efficient_attention_always = _Difference(until=(2, 14))
    """native/transformers/cuda/attention.cu, _efficient_attention_forward: even without dropout."""
    cudnn_backward_by_keys_alone = _Difference((2, 15))
    """Which kernel of cuDNN 9.26 runs on Blackwell depends on the keys, not the queries."""
    numbers_rows_in_64_bits = _Difference((2, 13))
    """See sorting.unique_scratch."""
    sorts_embedding_indices_by_used_bits = _Difference((2, 13))
    """native/cuda/Embedding.cu, embedding_dense_backward_cuda."""
    finds_both_bounds_at_once = _Difference((2, 13))
    """native/cuda/Indexing.cu, index_put_with_sort_kernel: aminmax of the index, not min and max."""
    packs_norms_of_lists = _Difference((2, 15))
    """native/cuda/ForeachReduceOp.cu: partial results for a tensor's own chunks, not the largest's."""
    fsdp_divides_integers = _Difference((2, 12))
    """torch/distributed/fsdp/_fully_shard/_fsdp_param.py: before, every part wants a gradient at first."""
    autocasts_rms_norm = _Difference((2, 12))
    """autocast_mode.h, AT_FORALL_FP32."""
