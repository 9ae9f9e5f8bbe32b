"""What cuDNN's attention takes, against what cuDNN itself asked for when PyTorch let it plan.

The calls are in tests/recordings/cudnn_plans, cuDNN 9.19 to 9.26.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.virtual_gpu.cudnn_plans import ATTENTION, BACKWARD
from harness.hardware.hardware import find_hardware
from harness.kernels import Take, script_of
from harness.kernels.gpu import Gpu, capability_of
from harness.system import TorchRelease
from tests.support.places import RECORDINGS

RECORDED = sorted((RECORDINGS / "cudnn_plans").glob("*.json"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def workspaces(call: dict[str, Any], gpu: Gpu) -> tuple[int, int]:
    dtype = getattr(torch, call["dtype"])
    query = meta(call["batch"], call["heads"], call["length"], call["head_dim"], dtype=dtype)
    key = meta(call["batch"], call["key_heads"], call["key_length"], call["head_dim"], dtype=dtype)
    how = (call["dropout_p"], call["is_causal"])
    sums, seed = meta(*query.shape[:3]), meta(dtype=torch.int64)
    made = (query, sums, None, None, call["length"], call["key_length"], seed, seed, None)
    forward = script_of(ATTENTION, (query, key, key, None, True, *how), {}, made, gpu)
    args = (query, query, key, key, query, sums, seed, seed, None, None, None, *made[4:6], *how)
    backward = script_of(BACKWARD, args, {}, (query, key, key), gpu)
    return tuple(sum(s.size_bytes for s in each if isinstance(s, Take)) for each in (forward, backward))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_plans_take_what_cudnn_asked_for(path: Path) -> None:
    recorded = json.loads(path.read_text())
    hardware = find_hardware(recorded["device"])
    release = TorchRelease.of(recorded["torch"])
    assert release.cudnn_version == recorded["cudnn"]
    gpu = Gpu(capability_of(hardware.datasheet.compute_capability), hardware.sm_count, release)
    calls = recorded["calls"]
    assert len(calls) >= 150
    assert sum(call["heads"] != call["key_heads"] for call in calls) > 50
    asked = [(call["forward"], call["backward"]) for call in calls]
    assert [workspaces(call, gpu) for call in calls] == asked


def test_every_release_was_asked() -> None:
    assert {path.stem for path in RECORDED} >= {
        f"{device}-torch-{release}"
        for device in ("h200", "b200")
        for release in ("2.11", "2.13", "2.14", "2.15")
    }
