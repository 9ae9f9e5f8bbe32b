"""The GPU, and the release of torch on it, that an operator's sizes depend on besides the shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.hardware import threads_per_sm

MIB, KIB = 2**20, 2**10
THREADS = 2
"""That multiply in a training step, each with a workspace of its own: Python's, and autograd's."""


def _since(major: int, minor: int) -> Any:
    return property(lambda release: release >= (major, minor))


class TorchRelease(NamedTuple):
    """A release of torch: each of its differences that decides about memory has one name.

    From 2.11, which the machine for the hardware profiles has, to 2.15. Sources are under aten/src/ATen.
    """

    major: int
    minor: int

    @classmethod
    def of(cls, version: str) -> TorchRelease:
        """(2, 13) of "2.13.0+cu130"."""
        major, minor = version.split(".")[:2]
        return cls(int(major), int(minor))

    @property
    def cudnn_version(self) -> int:
        """nvidia-cudnn-cu13 as the CUDA 13 wheels pin it, as cudnnGetVersion() returns it."""
        known = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}
        return known[max((release for release in known if release <= self), default=min(known))]

    # cuda/CublasHandlePool.cpp
    keeps_cublas_workspaces = property(lambda release: release < (2, 15))
    """For the life of the process. Otherwise every call takes one and frees it."""
    shares_cublas_workspaces = property(lambda release: (2, 12) <= release < (2, 15))
    """The "unified" workspace: cuBLASLt uses that of cuBLAS."""
    blackwell_has_hoppers_workspace = _since(2, 12)

    # native/transformers/cuda/sdp_utils.cpp, by the names of its checks
    every_gpu_10_prefers_cudnn = _since(2, 13)
    """check_prefer_cudnn_attention: before, 10.0 and 10.3 of compute capability 10.x."""
    checks_cudnn_dropout = _since(2, 12)
    """check_cudnn_dropout: cuDNN's probability has a resolution of 1/16."""
    checks_cudnn_grid = _since(2, 13)
    """check_cudnn_tensor_shapes: batch and heads are dimensions of the launch grid."""
    checks_flash_grid = _since(2, 15)
    """check_flash_attention_grid_size: the same."""
    knows_cudnn_head_dim_256 = _since(2, 14)
    """check_cudnn_tensor_shapes by cuDNN's version, and check_cudnn_d256_bprop_head_dim."""
    refuses_single_queries_to_cudnn = _since(2, 14)
    """check_cudnn_tensor_shapes: on compute capability 10.x, with some versions of cuDNN."""
    efficient_attention_groups_heads = _since(2, 14)
    """check_batch_size_and_num_heads_dense; one key-value head also broadcasts, in every kernel."""

    seeds_efficient_attention_always = property(lambda release: release < (2, 14))
    """native/transformers/cuda/attention.cu, _efficient_attention_forward: even without dropout."""
    cudnn_backward_by_keys_alone = _since(2, 15)
    """Which kernel of cuDNN 9.26 runs on Blackwell depends on the keys, not the queries."""
    numbers_rows_in_64_bits = _since(2, 13)
    """See sorting.unique_scratch."""
    sorts_embedding_indices_by_used_bits = _since(2, 13)
    """native/cuda/Embedding.cu, embedding_dense_backward_cuda."""
    finds_both_bounds_at_once = _since(2, 13)
    """native/cuda/Indexing.cu, index_put_with_sort_kernel: aminmax of the index, not min and max."""
    packs_norms_of_lists = _since(2, 15)
    """native/cuda/ForeachReduceOp.cu: partial results for a tensor's own chunks, not the largest's."""
    autocasts_rms_norm = _since(2, 12)
    """autocast_mode.h, AT_FORALL_FP32."""


class Workspaces(NamedTuple):
    """What torch gives to cuBLAS and cuBLASLt, one of each per handle and stream.

    Each thread that multiplies has a handle of its own: the one that runs forward, and autograd's for the
    device. So a training step has two. They come from the caching allocator.
    """

    cublas_bytes: int
    cublaslt_bytes: int
    """0: cuBLASLt shares cuBLAS' workspace. Only addmm with a one-dimensional bias calls cuBLASLt."""
    kept: bool
    """See TorchRelease.keeps_cublas_workspaces."""


@dataclass(frozen=True)
class Gpu:
    """What the sizes depend on besides the shapes."""

    capability: tuple[int, int]
    """Compute capability: (9, 0) for 9.0."""
    sm_count: int
    """Streaming multiprocessors: 132 on an H100 or H200 SXM, 108 on an A100."""
    torch: TorchRelease
    kept_workspace_bytes: int | None = None
    """What both threads together were seen to keep on this device; None: nobody has looked."""

    @property
    def threads_per_sm(self) -> int:
        """Resident threads of one multiprocessor."""
        return threads_per_sm(self.capability)

    @property
    def workspaces(self) -> Workspaces:
        """Those seen; else the defaults, CUBLAS_WORKSPACE_CONFIG and CUBLASLT_WORKSPACE_SIZE unset.

        ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize (4096 KiB * 8 on Hopper, and on Blackwell
        since 2.12; before and elsewhere :4096:2:16:8) and _parseChosenCUDABlasLtWorkspaceSize (1 MiB). What
        was seen to stay says nothing about a release that keeps none.
        """
        kept = self.torch.keeps_cublas_workspaces
        if kept and self.kept_workspace_bytes is not None:
            return Workspaces(self.kept_workspace_bytes // THREADS, 0, kept)
        major = self.capability[0]
        large = major == 9 or (major >= 10 and self.torch.blackwell_has_hoppers_workspace)
        cublas_bytes = 8 * 4096 * KIB if large else 2 * 4096 * KIB + 8 * 16 * KIB
        return Workspaces(cublas_bytes, 0 if self.torch.shares_cublas_workspaces else MIB, kept)


def capability_of(compute_capability: str) -> tuple[int, int]:
    """(9, 0) of "9.0"."""
    major, minor = compute_capability.split(".")
    return int(major), int(minor)
