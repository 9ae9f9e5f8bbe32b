"""What is watched on a virtual GPU, against the statistics PyTorch keeps when nobody watches."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.virtual_gpu.watched import CASES, LIBRARIES, PROGRAMS, TORCHRUN, both
from harness.report import read_run, section_of
from harness.snapshot import read_snapshot, recording_of
from harness.step_profile.step_profile import StepProfile
from harness.units import ms
from tests.support.commands import run_harness

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


def counts(folder: Path, kind: str, *options: str, gpu: str = "h100", status: int = 0) -> list[str]:
    """The lines that counts.py prints under `harness watch`, whose run folder is `run`."""
    watch = ("watch", "--gpu", gpu, "--out", "run", *options, "--")
    command = (sys.executable, str(PROGRAMS / "counts.py"), *kind.split(":"))
    done = run_harness(*watch, *command, cwd=folder, status=status)
    (folder / "stderr").write_text(done.stderr)
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["plain", "resets", "evaluates", "records", "records later"])
def test_a_program_is_told_of_its_memory_as_if_nobody_watched(kind: str, emulate, tmp_path: Path) -> None:
    """Its peaks since its own resets, and its own recording to the last entry."""
    alone = emulate(sys.executable, str(PROGRAMS / "counts.py"), kind).stdout.splitlines()
    assert len(alone) >= 12
    assert counts(tmp_path, kind) == alone
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    if kind == "evaluates":  # which peaks above all else
        assert f"evaluated {profile.phases['evaluation'].peak_allocated_bytes}" in alone
        assert profile.memory.peak_phase == "optimizer_step"
        assert (profile.phases["evaluation"].peak_allocated_bytes or 0) > (
            profile.memory.peak_allocated_bytes or 0
        )
        assert "in its evaluation" in (tmp_path / "stderr").read_text()
    else:
        assert alone[10].split()[1] == str(profile.memory.peak_allocated_bytes)
    assert profile.memory.at_peak.total_bytes() == profile.memory.peak_allocated_bytes


def test_phases_take_what_the_device_counts_as_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first step, which peaks highest as its states are made, has a time axis."""
    monkeypatch.setenv("VIRTUAL_GPU_TIMES", str(tmp_path))
    counts(tmp_path, "plain", "--steps", "1")
    (told,) = tmp_path.glob("*-times.json")
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    took = [profile.phases[name].time_s.median or 0 for name in ("forward", "backward", "optimizer_step")]
    assert all(took)
    assert sum(took) == pytest.approx(json.loads(told.read_text())["busy_s"], rel=0.03)
    assert sum(took) == pytest.approx(profile.step.time_s.median, rel=0.03)
    assert "times: estimated" in (tmp_path / "stderr").read_text()
    history = read_run(tmp_path / "run").history
    assert history is not None
    assert history.time_us is not None
    assert history.time_us[-1] - history.time_us[0] == pytest.approx(sum(took) * 1e6, rel=0.2)


def test_watching_takes_no_time_of_the_program_s(tmp_path: Path) -> None:
    """Though it takes three seconds a step."""
    (tmp_path / "train.py").write_text(
        "import time, torch, harness.loops.recorder as of\n"
        "enter = of.LoopRecorder.enter\n"
        "of.LoopRecorder.enter = lambda *given: (time.sleep(3 * (given[1] == 'backward')), enter(*given))\n"
        "layer = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(layer.parameters())\n"
        "begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "for _ in range(2):\n"
        "    begin.record()\n"
        "    layer(torch.ones(8, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    end.record()\n"
        "    torch.cuda.synchronize()\n"
        "print(begin.elapsed_time(end))\n"
    )
    done = run_harness("watch", "--gpu", "h100", "--", sys.executable, "train.py", cwd=tmp_path)
    assert 0 < float(done.stdout) < 3_000


def test_a_step_that_peaks_higher_than_the_recorded_ones_is_the_peak(tmp_path: Path) -> None:
    """Its eighth step has a thousand times the rows."""
    lines = counts(tmp_path, "grows:10")
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    memory = profile.memory
    assert str(memory.peak_allocated_bytes) == lines[-2].split()[1]
    assert (memory.peak_phase, memory.peak_step) == ("backward", 7)
    assert memory.at_peak.total_bytes() == memory.peak_allocated_bytes
    assert memory.at_peak.inputs_bytes == 64_000 * 1024 * 4
    assert profile.complete
    assert [w.split(":")[0] for w in profile.warnings] == ["step 8 peaked higher than steps 3-5"]
    said = (tmp_path / "stderr").read_text()
    assert "the program: fits in the 79.11 GiB of NVIDIA H100 80GB HBM3 with 7" in said
    assert "in backward of step 8" in said
    history = read_run(tmp_path / "run").history
    assert history is not None
    assert history.time_is_estimated
    assert history.time_us is not None
    assert history.time_us[0] == 0 < history.time_us[-1]
    kept, modules = {"parameters", "optimizer_state"}, {"0", "2"}  # of an nn.Sequential: its two Linears
    recording = recording_of(read_snapshot(tmp_path / "run" / "snapshot.pickle"))
    known = zip(recording.categories or (), recording.spans, strict=True)
    of_modules = {(category, span.module) for category, span in known if category in kept and span.module}
    assert of_modules == {(category, module) for category in kept for module in modules}


def test_memory_that_runs_out_in_the_first_step_is_explained(tmp_path: Path) -> None:
    counts(tmp_path, "runs out", gpu="rtx-4090", status=1)
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    assert profile.oom is not None
    assert (profile.oom.phase, profile.oom.requested_bytes) == ("forward", 1_000_000 * 4096 * 4)
    hidden, inputs = profile.oom.top[:2]  # of the ReLU, which asks for its result
    assert (hidden.size_bytes, hidden.category) == (1_000_000 * 4096 * 4 + 2**20, "activations")
    assert (inputs.size_bytes, inputs.category) == (1_000_000 * 1024 * 4, "inputs")
    assert "counts.py" in hidden.stack[-1]
    assert profile.memory.peak_phase == "forward"
    assert profile.memory.at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    assert not profile.memory.at_peak.other_bytes
    assert profile.warnings == []


def test_memory_that_runs_out_before_the_first_step_is_explained(tmp_path: Path) -> None:
    """40 weights of 8,192 x 8,192 x 4 B go to a device that holds 29 of them, as PyTorch's message says."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "with torch.device('meta'):\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(40)))\n"
        "model.to_empty(device='cuda')\n"
    )
    command = ("watch", "--gpu", "rtx-3070", "--", sys.executable, "program.py")
    done = run_harness(*command, cwd=tmp_path, status=1)
    assert "7.25 GiB is allocated by PyTorch" in done.stderr
    said = " ".join(done.stderr.split())
    assert "memory ran out before the first step, with 7.25 GiB allocated of the 7.78 GiB of NVIDIA" in said
    assert "29 tensors; by their size 29 of 0.25 GiB." in said
    assert (
        "Sequential has 10.00 GiB of weights, more than the device has; 7.25 GiB of them are there." in said
    )


@pytest.mark.parametrize("steps", ["1", "1-3", "2-4", "3-5"])
def test_workspaces_are_other_whichever_steps_are_recorded(steps: str, tmp_path: Path) -> None:
    """cuBLAS takes one for each of the two threads that multiply, at their first product."""
    counts(tmp_path, "plain", "--steps", steps)
    at_peak = StepProfile.read(tmp_path / "run" / "profile.json").memory.at_peak
    assert at_peak.other_bytes == 2 * 32 * 2**20
    assert (at_peak.activations_bytes or 0) < 2**20


def test_a_program_that_leaves_without_a_word_keeps_its_finished_steps(tmp_path: Path) -> None:
    counts(tmp_path, "leaves", "--steps", "2", status=7)
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3
    memory = StepProfile.read(tmp_path / "run" / "profile.json").memory
    assert memory.peak_phase == "optimizer_step"
    assert memory.at_peak.total_bytes() == memory.peak_allocated_bytes


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
    done = run_harness("watch", *options, "--", *command, cwd=tmp_path, status=1)
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
    assert done.stderr.split("emulated: one step by phase")[1].count(explained) == 1
    assert done.stderr.count(explained) == 1  # where it happened, it is named in one line
    assert "out of memory in backward, explained at the end." in done.stderr
    section = section_of(read_run(tmp_path / "run"))
    assert any("the memory runs out in backward" in line for line in section.answer)


def test_several_devices_and_the_largest_value_on_each(tmp_path: Path) -> None:
    """A row of the batch is 8 GiB, and as much again as a gradient's temporary."""
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "weight = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(weight.parameters())\n"
        "rows = torch.ones(int(os.environ['BS']) * 2**20, 1024, device='cuda')\n"
        "for _ in range(3):\n"
        "    weight(rows).sum().backward()\n"
        "    optimizer.step()\n"
    )
    watch = ("watch", "--gpu", "rtx-4090,a100-40gb", "--fit", "BS=2..5", "--out", "run")
    done = run_harness(*watch, "--", sys.executable, "train.py", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    peaks = {
        (gpu, rows): StepProfile.read(tmp_path / "run" / gpu / f"BS-{rows}" / "profile.json").memory
        for gpu, rows in (("rtx-4090", 2), ("a100-40gb", 4))
    }
    assert "step, ms" in said
    took = StepProfile.read(tmp_path / "run" / "rtx-4090" / "BS-2" / "profile.json").step.time_s.median
    assert took is not None
    assert f"GiB {ms(took)}" in said
    assert "rtx-4090: the largest BS is 2: fits in the 23.64 GiB" in said
    assert "a100-40gb: the largest BS is 4: fits in the 39.50 GiB" in said
    for (_, rows), memory in peaks.items():
        assert (memory.peak_allocated_bytes or 0) >= 2 * rows * 4 * GiB
