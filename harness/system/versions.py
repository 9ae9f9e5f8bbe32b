"""The origin of a profile: commit, versions of libraries, and the environment variables on a list."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from harness.system.locations import PACKAGE

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "flash-attn",
    "liger-kernel",
    "triton",
    "datasets",
    "schedulefree",
    "galore-torch",
    "apollo-torch",
    "torchao",
    "trl",
)
SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_DISABLE_NATIVE_JIT",
    "TORCH_NCCL_BLOCKING_WAIT",
    "VIRTUAL_GPU",
)
"""The only environment variables ever recorded: each changes memory or time, none holds a secret."""


def provenance() -> dict[str, Any]:
    """Facts about the code and libraries that produced a profile, without importing them."""
    from harness.version import __version__

    return {
        "harness": __version__,
        **_commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "versions": installed_versions(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def installed_versions() -> dict[str, str]:
    """The version of each of PACKAGES that is installed, by name."""
    return {name: found for name in PACKAGES if (found := installed_version(name)) is not None}


@cache  # an imported library stays what it is, and looking up all takes a twentieth of a small simulation
def installed_version(package: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """The checkout's commit and whether it has uncommitted changes; None where git cannot tell."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return {"git_commit": None, "git_dirty": None}

    command = ["git", "status", "--porcelain=v2", "--branch"]  # one process answers both questions
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a very slow disk
        return {"git_commit": None, "git_dirty": None}
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    heads = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if not heads or heads == ["(initial)"]:  # no commit yet
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": heads[0], "git_dirty": any(not line.startswith("#") for line in lines)}
