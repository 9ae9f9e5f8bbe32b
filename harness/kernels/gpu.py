"""The GPU, and the release of torch on it, that an operator's sizes depend on besides the shapes."""

import os
from dataclasses import dataclass
from typing import NamedTuple

from harness.hardware import Hardware, threads_per_sm
from harness.system import CUBLAS_WORKSPACE_BYTES, HOPPERS_CUBLAS_WORKSPACE_BYTES, TorchRelease

MIB, KIB = 2**20, 2**10
NATIVE_JIT_DISABLED = "TORCH_DISABLE_NATIVE_JIT"
"""An environment variable of PyTorch's: with "1" it does without operators that it compiles when called."""
THREADS = 2
"""The threads that multiply in a training step, each with a workspace of its own: Python's and autograd's."""


class Workspaces(NamedTuple):
    """The workspaces that torch gives to cuBLAS and cuBLASLt, one of each per handle and stream.

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
    """What the sizes of an operator's allocations depend on besides the shapes."""

    capability: tuple[int, int]
    """Compute capability: (9, 0) for 9.0."""
    sm_count: int
    """Streaming multiprocessors: 132 on an H100 or H200 SXM, 108 on an A100."""
    torch: TorchRelease
    native_jit: bool = True
    """Whether PyTorch may use operators that it compiles when called (see NATIVE_JIT_DISABLED)."""
    kept_workspace_bytes: int | None = None
    """The workspace bytes that both threads together kept when this device was measured; None: it was not."""

    l2_bytes: int = 0
    """Of the L2 cache; code that measures kernels writes as much between two of them."""

    @classmethod
    def of(cls, hardware: Hardware, torch_version: str) -> "Gpu":
        """A device of the table under a release of torch, with this process's settings."""
        return cls(
            capability_of(hardware.datasheet.compute_capability),
            hardware.sm_count,
            TorchRelease.of(torch_version),
            os.environ.get(NATIVE_JIT_DISABLED) != "1",
            hardware.calibration.cublas_workspace_bytes,
            hardware.datasheet.l2_bytes,
        )

    @property
    def threads_per_sm(self) -> int:
        """Resident threads of one multiprocessor."""
        return threads_per_sm(self.capability)

    @property
    def multiplies_outer_products_in_triton(self) -> bool:
        """See TorchRelease."""
        return self.native_jit and self.torch.multiplies_outer_products_in_triton

    @property
    def workspaces(self) -> Workspaces:
        """The measured workspaces, else torch's defaults, without CUBLAS_WORKSPACE_CONFIG and
        CUBLASLT_WORKSPACE_SIZE. What was measured says nothing about a release that keeps no workspaces.

        ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize (Hopper's on Blackwell, too, since 2.12) and
        _parseChosenCUDABlasLtWorkspaceSize (1 MiB).
        """
        kept = self.torch.keeps_cublas_workspaces
        if kept and self.kept_workspace_bytes is not None:
            return Workspaces(self.kept_workspace_bytes // THREADS, 0, kept)
        major = self.capability[0]
        large = major == 9 or (major >= 10 and self.torch.blackwell_has_hoppers_workspace)
        cublas_bytes = HOPPERS_CUBLAS_WORKSPACE_BYTES if large else CUBLAS_WORKSPACE_BYTES
        return Workspaces(cublas_bytes, 0 if self.torch.shares_cublas_workspaces else MIB, kept)


def capability_of(compute_capability: str) -> tuple[int, int]:
    """(9, 0) for "9.0"."""
    major, minor = compute_capability.split(".")
    return int(major), int(minor)
