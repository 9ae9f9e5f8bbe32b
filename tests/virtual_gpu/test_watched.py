"""What is watched on a virtual GPU, against the statistics PyTorch keeps when nobody watches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.virtual_gpu.watched import CASES, LIBRARIES, both

pytestmark = pytest.mark.virtual_gpu
FEW = ("plain loop", "TRL SFTTrainer")
LEAVES_THE_GPU = ("plain loop", "Lightning")
"""They take the model off it before they end; their peak is after the first step, which has no states yet."""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FEW]


@pytest.mark.parametrize("name", [*FEW, *SLOW])
def test_categories_add_up_to_the_peak_of_the_unwatched_program(name: str, tmp_path: Path) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    command, steps = CASES[name]
    rows = both(command, steps, tmp_path)
    assert len(rows) == (2 if "2 ranks" in name else 1)
    for row in rows:
        assert row["source"] == "emulated"
        assert row["complete"]
        assert row["steps"] == steps
        assert set(row["phases"]) >= {"forward", "backward", "optimizer_step"}
        assert row["sum_of_categories_bytes"] == row["peak_bytes"]
        assert 0 < row["at_peak"]["parameters_bytes"] < row["peak_bytes"]
        if name in LEAVES_THE_GPU:
            assert 0 < row["at_peak"]["optimizer_state_bytes"] < row["peak_bytes"]
        assert row["sum_of_categories_bytes"] == pytest.approx(row["unwatched_peak_bytes"], rel=0.001)


EVALUATES_AFTERWARDS = """
import torch
from torch import nn
model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    logits = [model(torch.ones(4096, 512, device="cuda")) for _ in range(3)]
print(torch.cuda.max_memory_allocated())
torch.save(model.state_dict(), "weights.pt")
"""


def test_an_evaluation_after_the_recorded_steps_has_its_peak(tmp_path: Path) -> None:
    """It is a phase that no recorded step has. It peaks above all else, so PyTorch's own peak is its peak."""
    (tmp_path / "train.py").write_text(EVALUATES_AFTERWARDS)
    watch = [sys.executable, "-m", "harness", "watch", "--gpu", "h100", "--steps", "2-3", "--out", "run"]
    done = subprocess.run(
        [*watch, "--", sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    profile = json.loads((tmp_path / "run" / "profile.json").read_bytes())
    peak = profile["phases"]["evaluation"]["peak_allocated_bytes"]
    assert str(peak) in done.stdout.splitlines()
    assert 0 < profile["phases"]["saving"]["peak_allocated_bytes"] <= peak
    assert any(
        warning.startswith("evaluation in a step that was not recorded") for warning in profile["warnings"]
    )
