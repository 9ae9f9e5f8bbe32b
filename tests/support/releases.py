"""Tests that are about some releases of the libraries, and are skipped with others."""

import re

import pytest
import torch

from harness.system import TorchRelease, installed_version
from tests.support.places import ROOT

keeps_workspaces = pytest.mark.skipif(
    not TorchRelease.of(torch.__version__).keeps_cublas_workspaces,
    reason="since PyTorch 2.15 every product takes a workspace and frees it; these numbers are from before",
)


def pinned() -> dict[str, str]:
    """Name and version of every distribution in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([A-Za-z0-9._-]+)==([^ ;]+)", line) for line in lines)
    return {normal(match[1]): match[2] for match in found if match}


def normal(name: str) -> str:
    """A distribution's name as all its spellings are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def of_tested_releases(*names: str) -> pytest.MarkDecorator:
    """Skips a test where one of these distributions is not the one of constraints.txt."""
    versions = pinned()
    others = [
        n for n in names if (installed_version(n) or "").partition("+")[0] != versions[n].partition("+")[0]
    ]
    return pytest.mark.skipif(bool(others), reason=f"of the {', '.join(others)} in constraints.txt")
