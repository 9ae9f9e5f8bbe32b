"""The GPU, and the release of torch on it, that an operator's sizes depend on besides the shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MIB, KIB = 2**20, 2**10
THREADS = 2
"""That multiply in a training step, each with a workspace of its own: Python's, and autograd's."""


class TorchRelease(NamedTuple):
    """A release of torch, 2.11 or later: each of its differences that decides about memory has one name."""

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

    # ---- cuBLAS (ATen/cuda/CublasHandlePool.cpp) ----

    @property
    def keeps_cublas_workspaces(self) -> bool:
        """For the life of the process. Otherwise every call takes one and frees it."""
        return self < (2, 15)

    @property
    def shares_cublas_workspaces(self) -> bool:
        """The "unified" workspace: cuBLASLt uses that of cuBLAS."""
        return (2, 12) <= self < (2, 15)

    @property
    def blackwell_has_hoppers_workspace(self) -> bool:
        return self >= (2, 12)

    # ---- attention (ATen/native/transformers, sdp_utils.cpp where not told) ----

    @property
    def every_gpu_10_prefers_cudnn(self) -> bool:
        """check_prefer_cudnn_attention: before, compute capability 10.0 and 10.3 of 10.x."""
        return self >= (2, 13)

    @property
    def checks_cudnn_dropout(self) -> bool:
        """check_cudnn_dropout: cuDNN's probability has a resolution of 1/16."""
        return self >= (2, 12)

    @property
    def checks_cudnn_grid(self) -> bool:
        return self >= (2, 13)

    @property
    def knows_cudnn_head_dim_256(self) -> bool:
        """check_cudnn_tensor_shapes by cuDNN's version, and check_cudnn_d256_bprop_head_dim."""
        return self >= (2, 14)

    @property
    def refuses_single_queries_to_cudnn(self) -> bool:
        """On compute capability 10.x, with some versions of cuDNN."""
        return self >= (2, 14)

    @property
    def checks_flash_grid(self) -> bool:
        """check_flash_attention_grid_size: batch and heads are dimensions of the launch grid."""
        return self >= (2, 15)

    @property
    def efficient_attention_groups_heads(self) -> bool:
        """check_batch_size_and_num_heads_dense; one key-value head also broadcasts, in every kernel."""
        return self >= (2, 14)

    @property
    def seeds_efficient_attention_always(self) -> bool:
        """cuda/attention.cu, _efficient_attention_forward: host tensors even where there is no dropout."""
        return self < (2, 14)

    @property
    def cudnn_backward_by_keys_alone(self) -> bool:
        """Which kernel of cuDNN 9.26 runs on Blackwell depends on the keys, not the queries."""
        return self >= (2, 15)

    # ---- other operators (ATen/native) ----

    @property
    def unique_by_key_of_cub_3(self) -> bool:
        """The cub of the CUDA toolkit that the wheels are built with; see sorting.unique_scratch."""
        return self >= (2, 13)

    @property
    def sorts_embedding_indices_by_used_bits(self) -> bool:
        """cuda/Embedding.cu, embedding_dense_backward_cuda."""
        return self >= (2, 13)

    @property
    def finds_both_bounds_at_once(self) -> bool:
        """cuda/Indexing.cu, index_put_with_sort_kernel: aminmax of the index, not min and max."""
        return self >= (2, 13)

    @property
    def packs_norms_of_lists(self) -> bool:
        """cuda/ForeachReduceOp.cu: each tensor has partial results for its own chunks, not the largest's."""
        return self >= (2, 15)

    @property
    def autocasts_rms_norm(self) -> bool:
        """ATen/autocast_mode.h, AT_FORALL_FP32."""
        return self >= (2, 12)


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
        """Resident threads of one multiprocessor (CUDA programming guide, technical specifications)."""
        major, minor = self.capability
        if self.capability == (7, 5):
            return 1024
        return 1536 if (major == 8 and minor >= 6) or major >= 12 else 2048

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
