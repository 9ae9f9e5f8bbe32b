"""Settings of PyTorch's allocator and pools of memory on a virtual GPU: memory that can grow, and MemPool."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_harness

pytestmark = pytest.mark.virtual_gpu
EXPANDABLE = "expandable_segments:True"
RECIPE = ("smoke", "steps=2", "warmup_steps=1")


def _memory(tmp_path: Path, *command: str) -> list[int]:
    memory = json.loads(run_harness(*command, "--json", cwd=tmp_path).stdout)["memory"]
    return [memory["peak_allocated_bytes"], memory["peak_reserved_bytes"]]


def test_segments_that_expand_as_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own allocator with the driver's calls for them, and the simulation of it; not what it is
    without."""
    simulate = ("simulate", *RECIPE, "hardware=h100")
    plain, expected = _memory(tmp_path, *simulate), _memory(tmp_path, *simulate, "--allocator", EXPANDABLE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    assert _memory(tmp_path, "run", *RECIPE, "--gpu", "h100", "--out", "run") == expected != plain


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
def test_a_pool_has_its_own_memory_and_gives_it_back(
    emulate, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    """What PyTorch documents of MemPool, counted by the device."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    code = """
import torch
mib = 1 << 20
def taken():
    free, total = torch.cuda.mem_get_info()
    return (total - free) // mib
def has():
    return sum(segment["total_size"] for segment in pool.snapshot()) // mib
before, pool = taken(), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    inside = torch.empty(40 * mib, dtype=torch.uint8, device="cuda")
del inside
outside = torch.empty(40 * mib, dtype=torch.uint8, device="cuda")
print(has(), taken() - before)
del pool
torch.cuda.empty_cache()
print(taken() - before)
"""
    assert emulate(code=code).stdout.split() == ["40", "80", "40"]
