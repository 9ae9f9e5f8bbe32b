"""Commands on virtual GPUs. What is marked virtual_gpu needs PyTorch's CUDA build and no GPU: `make
virtual-gpu` runs it in an environment that has it."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import run_harness

Emulate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def emulate(tmp_path: Path) -> Emulate:
    """Run Python code, or a command, on virtual GPUs in a folder of its own."""

    def run(
        *command: str,
        code: str | None = None,
        gpu: str = "h100",
        options: tuple[str, ...] = (),
        status: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        if code is not None:
            command = (sys.executable, "-c", textwrap.dedent(code))
        return run_harness("emulate", "--gpu", gpu, *options, "--", *command, cwd=tmp_path, status=status)

    return run
