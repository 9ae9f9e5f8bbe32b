"""What matrix products and cuDNN's attention do with the allocator, against what PyTorch's own host code did
for the same operands and what cuDNN itself asked for when PyTorch let it plan.

The calls are in tests/recordings/matrix_products and tests/recordings/cudnn_plans, of each release.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.virtual_gpu.cudnn_plans import ATTENTION, BACKWARD
from benchmarks.virtual_gpu.matrix_products import overload, tensors
from harness.hardware.hardware import find_hardware
from harness.kernels import Free, Keep, Take, script_of
from harness.kernels.gpu import Gpu, capability_of
from harness.system import TorchRelease
from tests.support.places import RECORDINGS

PRODUCTS = sorted((RECORDINGS / "matrix_products").glob("*.json"))
PLANS = sorted((RECORDINGS / "cudnn_plans").glob("*.json"))


def gpu_of(recorded: dict[str, Any]) -> Gpu:
    hardware = find_hardware(recorded["device"])
    capability = capability_of(hardware.datasheet.compute_capability)
    how = [recorded["native_jit"]] if "native_jit" in recorded else []
    return Gpu(capability, hardware.sm_count, TorchRelease.of(recorded["torch"]), *how)


def actions(call: dict[str, Any], gpu: Gpu) -> list[int]:
    """Bytes asked for, and less than 0 for those given back."""
    func, operands = overload(call), tensors(call, "meta")
    out = func(*operands, **call["scales"])
    found, temporaries = [], []
    for step in script_of(func, operands, call["scales"], out, gpu):
        if isinstance(step, Free):
            found.append(-temporaries[step.temporary])
            continue
        size = step.size_bytes if isinstance(step, Take | Keep) else out.untyped_storage().nbytes()
        found += [size] if size else []
        temporaries += [size] if isinstance(step, Take) else []
    return found


@pytest.mark.parametrize("path", PRODUCTS, ids=lambda path: path.stem)
def test_products_do_what_pytorch_did(path: Path) -> None:
    recorded = json.loads(path.read_text())
    gpu = gpu_of(recorded)
    assert len(recorded["calls"]) >= 300
    different = [call for call in recorded["calls"] if actions(call, gpu) != call["actions"]]
    assert not different, (len(different), different[0], actions(different[0], gpu))


def test_every_release_was_recorded() -> None:
    assert {path.stem for path in PRODUCTS} >= {f"h200-torch-2.{minor}" for minor in range(11, 16)}
    assert {path.stem for path in PLANS} >= {
        f"{device}-torch-{release}"
        for device in ("h200", "b200")
        for release in ("2.11", "2.13", "2.14", "2.15")
    }


def test_outer_products_of_batches_take_no_workspace_since_torch_2_13() -> None:
    """All ways were recorded, of the same operands."""
    outer = {
        path.stem: [
            call["actions"]
            for call in json.loads(path.read_text())["calls"]
            if call["operator"] == "bmm" and call["operands"][0][0][2] == 1
        ]
        for path in PRODUCTS
    }
    assert len(outer["h200-torch-2.12"]) > 10
    assert all(len(actions) > 1 for actions in outer["h200-torch-2.12"])
    assert all(len(actions) == 1 for actions in outer["h200-torch-2.13"])
    assert outer["h200-torch-2.13-native-jit-disabled"] == outer["h200-torch-2.12"]


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


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plans_take_what_cudnn_asked_for(path: Path) -> None:
    recorded = json.loads(path.read_text())
    gpu = gpu_of(recorded)
    assert gpu.torch.cudnn_version == recorded["cudnn"]
    calls = recorded["calls"]
    assert len(calls) >= 150
    assert sum(call["heads"] != call["key_heads"] for call in calls) > 50
    asked = [(call["forward"], call["backward"]) for call in calls]
    assert [workspaces(call, gpu) for call in calls] == asked
