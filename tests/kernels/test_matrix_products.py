"""What matrix products do with the allocator, against what PyTorch's own host code did for the same operands.

The calls are in tests/recordings/matrix_products, of each release.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.virtual_gpu.matrix_products import overload, tensors
from harness.hardware.hardware import find_hardware
from harness.kernels import Free, Keep, Take, script_of
from harness.kernels.gpu import Gpu, capability_of
from harness.system import TorchRelease
from tests.support.places import RECORDINGS

RECORDED = sorted((RECORDINGS / "matrix_products").glob("*.json"))


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


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_products_do_what_pytorch_did(path: Path) -> None:
    recorded = json.loads(path.read_text())
    hardware = find_hardware(recorded["device"])
    release = TorchRelease.of(recorded["torch"])
    capability = capability_of(hardware.datasheet.compute_capability)
    gpu = Gpu(capability, hardware.sm_count, release, recorded["native_jit"])
    assert len(recorded["calls"]) >= 300
    different = [call for call in recorded["calls"] if actions(call, gpu) != call["actions"]]
    assert not different, (len(different), different[0], actions(different[0], gpu))


def test_every_release_was_recorded() -> None:
    assert {path.stem for path in RECORDED} >= {f"h200-torch-2.{minor}" for minor in range(11, 16)}


def test_outer_products_of_batches_take_no_workspace_since_torch_2_13() -> None:
    """All ways were recorded, of the same operands."""
    outer = {
        path.stem: [
            call["actions"]
            for call in json.loads(path.read_text())["calls"]
            if call["operator"] == "bmm" and call["operands"][0][0][2] == 1
        ]
        for path in RECORDED
    }
    assert len(outer["h200-torch-2.12"]) > 10
    assert all(len(actions) > 1 for actions in outer["h200-torch-2.12"])
    assert all(len(actions) == 1 for actions in outer["h200-torch-2.13"])
    assert outer["h200-torch-2.13-native-jit-disabled"] == outer["h200-torch-2.12"]
