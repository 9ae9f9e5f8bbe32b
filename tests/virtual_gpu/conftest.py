"""Commands on virtual GPUs. What is marked virtual_gpu needs PyTorch's CUDA build and no GPU: `make
virtual-gpu` runs it in an environment that has it."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

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
        whole = [sys.executable, "-m", "harness", "emulate", "--gpu", gpu, *options, "--", *command]
        done = subprocess.run(whole, capture_output=True, text=True, cwd=tmp_path, timeout=3600, check=False)
        assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    return run
