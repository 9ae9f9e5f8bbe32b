"""Fourier transforms, decompositions and sparse products on the virtual GPU: cuFFT, cuSOLVER and cuSPARSE
compute nothing."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.virtual_gpu


def test_transforms_decompositions_and_sparse_products_run(emulate) -> None:
    """What follows from the host's data is as PyTorch's CPU has it; what kernels would compute has the CPU's
    shapes, and gradients."""
    result, work_space = (
        1024 * 513 * 8,
        1024 * 1024 * 8,
    )  # NVIDIA: a complex number for each element, at the least
    done = emulate(sys.executable, str(Path(__file__).parent / "programs" / "mathematics.py"))
    assert int(done.stdout) == result + work_space
    told = r"work spaces of cuFFT \(\d+ plans, .*\), cuSOLVER \(\d+ calls, .*\), cuSPARSE \(\d+ calls, "
    assert re.search(told, done.stderr)


def test_work_spaces_of_unknown_size_are_counted(emulate) -> None:
    """PyTorch asks for one a matrix product, and for none with cuBLAS."""
    code = """
import torch
x, csr = torch.eye(8).cuda(), torch.eye(8).to_sparse_csr().cuda()
if "CALLS" == "sparse":
    csr @ x, csr @ x, csr @ x
x @ x
"""
    done = emulate(code=code.replace("CALLS", "sparse"))
    assert done.stderr.endswith("the work spaces of cuSPARSE (3 calls, with none).\n")
    assert "work space" not in emulate(code=code).stderr


def test_a_library_that_nobody_replaces_is_named(emulate) -> None:
    code = """
import torch
x = torch.tensor([0, 0, 1, 1]).tile(128, 32).half().cuda()
for _ in range(2):
    try:
        torch.sparse.to_sparse_semi_structured(x)
    except RuntimeError:
        print("PyTorch said so")
"""
    done = emulate(code=code)
    assert done.stdout == "PyTorch said so\n" * 2
    assert done.stderr.count("here: libcusparseLt.so cannot be replaced") == 1
