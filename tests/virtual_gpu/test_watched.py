"""What is watched on a virtual GPU, against the statistics PyTorch keeps when nobody watches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.virtual_gpu.watched import CASES, LIBRARIES, PROGRAMS, TORCHRUN, both
from harness.report.run import read_run
from harness.report.sections import section_of
from harness.step_profile.step_profile import StepProfile

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
    logits = [model(torch.ones(65536, 512, device="cuda")) for _ in range(3)]
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


GiB = 2**30
RUNS_OUT = {
    "plain": (sys.executable, "runs_out.py", "plain"),
    "torchrun": (*TORCHRUN, "runs_out.py", "plain"),
    "trainer": (sys.executable, "runs_out.py", "trainer"),
    "trainer, torchrun": (*TORCHRUN, "runs_out.py", "trainer"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "trainer" in name else ()) for name in RUNS_OUT]
)
def test_memory_that_runs_out_in_a_recorded_step_is_explained(name: str, tmp_path: Path) -> None:
    command = [str(PROGRAMS / word) if word.endswith(".py") else word for word in RUNS_OUT[name]]
    gpus = "2" if "torchrun" in name else "1"
    options = ["--gpu", "rtx-4090", "--gpus", gpus, "--steps", "2-3", "--out", str(tmp_path / "run")]
    whole = [sys.executable, "-m", "harness", "watch", *options, "--", *command]
    done = subprocess.run(whole, capture_output=True, text=True, cwd=tmp_path, timeout=3600, check=False)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError" in done.stderr  # the program's own
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    assert not profile.complete
    assert profile.warnings == []
    assert (profile.ranks is not None) == ("torchrun" in name)
    oom = profile.oom
    assert oom is not None
    assert (oom.phase, oom.requested_bytes) == ("backward", 7 * GiB)
    assert oom.free_bytes is not None
    assert oom.free_bytes < 7 * GiB
    # as backward wants a fourth: what it was given, and what it has made
    assert [(held.size_bytes, held.category, held.phase) for held in oom.top[:3]] == [
        (7 * GiB, "activations", "forward"),
        (7 * GiB, "activations", "forward"),
        (7 * GiB, "temporaries", "backward"),
    ]
    assert "runs_out.py" in oom.top[0].stack[0]
    explained = "out of memory in backward, asking for 7.00 GiB on NVIDIA GeForce RTX 4090"
    assert done.stderr.split("emulated: one step by phase")[1].count(explained) == 1  # as the last words too
    section = section_of(read_run(tmp_path / "run"))
    assert any("the memory runs out in backward" in line for line in section.answer)
