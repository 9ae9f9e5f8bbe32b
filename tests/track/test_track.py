"""`--track`: what trackers are told, read back from their stores; and that none of them stops a run."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.recipe import load_recipe
from harness.step_profile.step_profile import StepProfile
from harness.sweep import plan_sweep, run_cells, tracked_cells
from harness.track import profile_values, recipe_config, track_run, tracker_names, tracking
from harness.track.told import step_values
from harness.virtual_gpu import outside
from tests.support.commands import Call, run_harness
from tests.support.places import ROOT
from tests.track.stores import of_mlflow, of_tensorboard, of_wandb

RUN = ("run", "smoke", "steps=2", "warmup_steps=1", "seq_len=32", "micro_batch_size=1", "--device", "cpu")
SENT = (
    *("loss", "tokens_per_s", "time/forward_s", "time/backward_s", "time/optimizer_step_s"),
    *("time/step_s", "memory/peak_allocated_bytes"),
)


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that three trackers were told: its working folder, and what was said."""
    pytest.importorskip("tensorboard", reason="the trackers' own packages are optional")
    pytest.importorskip("mlflow", reason="the trackers' own packages are optional")
    pytest.importorskip("wandb", reason="the trackers' own packages are optional")
    folder = tmp_path_factory.mktemp("tracked")
    done = run_harness(
        *RUN,
        "--out",
        "run",
        "--track",
        "tensorboard,mlflow",
        "--track",
        "wandb",
        cwd=folder,
        WANDB_MODE="offline",
        MLFLOW_TRACKING_URI=(folder / "store").as_uri(),
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    return folder, done.stderr


def activations_by_step(profile: StepProfile) -> list[tuple[int, float]]:
    """Of the recorded steps, which are the last two; the higher one is the profile's."""
    by_step = {one.step: one.at_peak for one in profile.memory.at_peak_by_step}
    assert list(by_step) == [3, 4]
    assert max(one.total_bytes() for one in by_step.values()) == profile.memory.peak_allocated_bytes
    assert profile.memory.at_peak in by_step.values()
    return [(step, float(one.activations_bytes or 0)) for step, one in by_step.items()]


def expected(run: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, float]]:
    """Of the log and the profile, by the names that the guide gives."""
    lines, profile = logged(run), StepProfile.read(run / "profile.json")
    told = {
        "loss": [(line["step"], line["loss"]) for line in lines],
        "time/forward_s": [(line["step"], line["forward_s"]) for line in lines if "forward_s" in line],
        "tokens_per_s": [(line["step"], 32 / line["step_s"]) for line in lines if "step_s" in line],
    }
    assert len(lines) == 5
    assert [len(values) for values in told.values()] == [5, 2, 2]
    told["memory/at_peak/activations_bytes"] = activations_by_step(profile)
    at_peak = profile.memory.at_peak
    return told, {
        "at_peak/activations_bytes": float(at_peak.activations_bytes or 0),
        "at_peak/parameters_bytes": float(at_peak.parameters_bytes or 0),
        "profile/peak_allocated_bytes": float(profile.memory.peak_allocated_bytes or 0),
        "phase/backward/peak_allocated_bytes": float(profile.phases["backward"].peak_allocated_bytes or 0),
    }


def test_tensorboard_has_every_step(tracked: tuple[Path, str]):
    folder, said = tracked
    told = of_tensorboard(folder / "run/tensorboard/smoke")
    steps, at_end = expected(folder / "run")
    for name, values in steps.items():
        assert [step for step, _ in told[name]] == [step for step, _ in values]
        assert [value for _, value in told[name]] == pytest.approx([value for _, value in values], rel=1e-6)
    for name, value in at_end.items():
        assert told[name] == [(4, pytest.approx(value, rel=1e-6))]
    assert set(SENT) <= told.keys()
    assert "tensorboard: " in said
    (hparams,) = (folder / "run/tensorboard/smoke").glob("*/hparams.yml")
    assert "seq_len: 32" in hparams.read_text()


def test_mlflow_has_every_step_the_recipe_and_the_files(tracked: tuple[Path, str], monkeypatch: Any):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder, _ = tracked
    ((name, (run, told)),) = of_mlflow(folder / "store").items()
    steps, at_end = expected(folder / "run")
    assert name == "smoke"
    assert {name: told[name] for name in steps} == steps
    assert {name: told[name] for name in at_end} == {name: [(4, value)] for name, value in at_end.items()}
    assert run.data.params["seq_len"] == "32"
    assert run.data.params["offload"] == "none"
    assert run.info.status == "FINISHED"
    kept = {path.name for path in Path(run.info.artifact_uri.removeprefix("file://")).iterdir()}
    assert kept == {"profile.json", "snapshot.pickle", "report.html"}


def test_wandb_has_every_step_the_recipe_and_the_files(tracked: tuple[Path, str]):
    folder, _ = tracked
    records = of_wandb(folder / "run/wandb")
    told: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in items.items():
                told.setdefault(name, []).append((items["_step"], value))
    steps, at_end = expected(folder / "run")
    past = [value for _, value in steps.pop("memory/at_peak/activations_bytes")]
    assert [value for _, value in told["memory/at_peak/activations_bytes"]] == past
    assert [value for _, value in told["recorded_step"]] == [3, 4]
    axes = {r.metric.name: r.metric.step_metric for r in records if r.WhichOneof("record_type") == "metric"}
    assert axes["memory/at_peak/activations_bytes"] == "recorded_step"
    assert {name: told[name] for name in steps} == steps
    assert {name: told[name] for name in at_end} == {name: [(4, value)] for name, value in at_end.items()}
    config = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records
        for item in (*record.run.config.update, *record.config.update)  # with the beginning, or after it
    }
    assert config["seq_len"] == 32
    asked = [record.request for record in records if record.WhichOneof("record_type") == "request"]
    artifacts = {record.artifact.name for record in records if record.WhichOneof("record_type") == "artifact"}
    artifacts |= {
        one.log_artifact.artifact.name for one in asked if one.WhichOneof("request_type") == "log_artifact"
    }
    assert {name.rpartition("-")[0] for name in artifacts} == {"profile", "snapshot", "report"}
    assert not (folder / "wandb").exists()  # all of it is in the run's folder


def test_a_tracker_that_is_missing_or_fails_stops_nothing(tmp_path: Path):
    broken = tmp_path / "broken"
    (broken / "mlflow").mkdir(parents=True)
    (broken / "mlflow/__init__.py").write_text("raise RuntimeError('no such store')")
    (broken / "wandb").mkdir()
    (broken / "wandb/__init__.py").write_text("import os; os._exit(9)")  # as a crash in C would
    (broken / "aim").mkdir()
    missing = "raise ModuleNotFoundError('there is none', name='%s')"
    (broken / "aim/__init__.py").write_text(  # as accelerate, which looks for an older package behind it
        f"try:\n    {missing % 'aim'}\nexcept ModuleNotFoundError:\n    {missing % 'older'}"
    )
    path = os.pathsep.join([str(broken), str(ROOT)])
    words = (*RUN, "--out", "run", "--track", "mlflow,wandb,aim")
    said = run_harness(*words, cwd=tmp_path, PYTHONPATH=path).stderr
    assert "mlflow: RuntimeError: no such store. The run folder has every number." in said
    assert "wandb: its process ended early: status 9. The run folder has every number." in said
    assert "aim: it needs the package aim, which is not installed. Run: pip install aim." in said
    assert "Traceback" not in said
    assert len(logged(tmp_path / "run")) == 5
    assert StepProfile.read(tmp_path / "run/profile.json").complete


def test_an_unknown_tracker_is_refused_before_anything_runs(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HARNESS_TRACK", "tensorbord")
    status, _, said = call(*RUN, "--out", "run")
    assert status == 2
    assert said.startswith("harness: --track tensorbord: there is no such tracker. Did you mean tensorboard?")
    assert list(tmp_path.iterdir()) == []


def test_names_are_taken_one_by_one_or_with_commas():
    assert tracker_names([]) == []
    assert tracker_names(["wandb, mlflow", "wandb"]) == ["wandb", "mlflow"]
    with pytest.raises(InputError, match="There are aim, clearml, comet_ml"):
        tracker_names(["paper"])


def test_a_sweep_is_a_run_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow", reason="the trackers' own packages are optional")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "store"
    sweep = ("sweep", "smoke", "seq_len=32,64", "--napkin", "--out", "here", "--track", "mlflow")
    run_harness(*sweep, cwd=tmp_path, MLFLOW_TRACKING_URI=store.as_uri())
    runs = of_mlflow(store)
    assert set(runs) == {"smoke base", "smoke seq_len=32", "smoke seq_len=64", "smoke sweep"}
    cells = [json.loads(path.read_text()) for path in (tmp_path / "here/cells").iterdir()]
    peaks = {cell["outcome"]["profile"]["memory"]["peak_allocated_bytes"] for cell in cells}
    told = {runs[name][1]["profile/peak_allocated_bytes"][0][1] for name in runs if name != "smoke sweep"}
    assert told == peaks
    assert runs["smoke seq_len=32"][0].data.params["seq_len"] == "32"
    kept = Path(runs["smoke sweep"][0].info.artifact_uri.removeprefix("file://"))
    assert {path.name for path in kept.iterdir()} == {"report.html", "sweep.json", "sweep.csv"}


def test_a_cell_that_was_there_already_is_not_told_again(tmp_path: Path):
    plan = plan_sweep("smoke", ["seq_len=32,64"], "napkin")
    (tmp_path / "cells").mkdir()
    first, again = (tracked_cells(plan, run_cells(plan, tmp_path), tmp_path, [tmp_path]) for _ in range(2))
    assert [run.name for run in first] == [
        "smoke base",
        "smoke seq_len=32",
        "smoke seq_len=64",
        "smoke sweep",
    ]
    assert all(run.config["status"] == "ok" for run in first[:3])
    assert (first[3].steps, first[3].files) == ([], [str(tmp_path)])
    assert again == []


LOOP = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


WATCH = ("watch", "--out", "run", "--track", "tensorboard", "--", sys.executable)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("words", "log"),
    [
        ((*WATCH, *TORCHRUN, "loop.py"), "run/ranks/0"),
        ((*RUN, "parallel=fsdp", "--gpus", "2", "--out", "run", "--track", "tensorboard"), "run"),
    ],
    ids=["a command", "a recipe"],
)
def test_ranks_are_told_as_one_run(tmp_path: Path, words: tuple[str, ...], log: str):
    pytest.importorskip("tensorboard", reason="the trackers' own packages are optional")
    (tmp_path / "loop.py").write_text(LOOP)
    run_harness(*words, cwd=tmp_path)
    (events,) = {
        path.parent
        for path in tmp_path.rglob("events.out.tfevents.*")
        if path.parent.parent.name == "tensorboard"
    }
    told = of_tensorboard(events)
    steps = [(line["step"], line["loss"]) for line in logged(tmp_path / log)]
    assert [step for step, _ in told["loss"]] == [step for step, _ in steps]
    assert [value for _, value in told["loss"]] == pytest.approx([loss for _, loss in steps])


def test_what_is_told():
    recipe = load_recipe("smoke", {"offload": ["activations", "optimizer"]})[1].model_dump(mode="json")
    config = recipe_config(recipe)
    assert config["offload"] == "activations,optimizer"
    assert all(isinstance(value, str | int | float | bool) for value in config.values())
    line = {
        "step": 3,
        "kind": "timed",
        "loss": None,
        "forward_s": 0.5,
        "tokens_per_s": 9.0,
        "not_finite": "nan",
    }
    assert step_values({**line, "peak_reserved_bytes": 7, "loss_scale": 2.0}) == {
        "time/forward_s": 0.5,
        "tokens_per_s": 9.0,
        "memory/peak_reserved_bytes": 7,
        "loss_scale": 2.0,
    }
    from harness.api import napkin

    values = profile_values(napkin("smoke"))
    assert values["at_peak/parameters_bytes"] > 0
    assert "profile/peak_reserved_bytes" not in values  # napkin does not know it


def test_a_tracker_s_process_has_no_virtual_gpu():
    from harness.virtual_gpu.launch import STARTUP

    inside = {
        "VIRTUAL_GPU": "h100",
        "VIRTUAL_GPU_COUNT": "1",
        "LD_PRELOAD": os.pathsep.join(["/built/libcudart.so.13", "/built/libcuda.so.1", "jemalloc.so"]),
        "LD_LIBRARY_PATH": "/built",
        "TRITON_LIBCUDA_PATH": "/built",
        "PYTHONPATH": os.pathsep.join([str(STARTUP), "mine"]),
        "PATH": os.pathsep.join([str(STARTUP / "bin"), "/bin"]),
        "WANDB_MODE": "offline",
    }
    mine = {"LD_PRELOAD": "jemalloc.so", "PYTHONPATH": "mine", "PATH": "/bin", "WANDB_MODE": "offline"}
    assert outside(inside) == mine
    mine = {"LD_PRELOAD": "jemalloc.so", "PATH": "/bin"}
    assert outside(mine) == mine


def test_a_run_that_left_no_profile_is_told_as_far_as_it_came(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="the trackers' own packages are optional")
    (tmp_path / "log.jsonl").write_text('{"step": 0, "loss": 2.5}\n{"step": 1, "lo')
    track_run(["tensorboard"], tmp_path, "killed", {"seq_len": 3}, lambda words: None)
    assert of_tensorboard(tmp_path / "tensorboard/killed") == {"loss": [(0, 2.5)]}


def test_a_tracker_that_hangs_or_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard", reason="the trackers' own packages are optional")
    (tmp_path / "aim").mkdir()
    (tmp_path / "aim/__init__.py").write_text("import time; time.sleep(3600)")
    (tmp_path / "log.jsonl").write_text('{"step": 0, "loss": 2.5}\n')
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(tracking, "PATIENCE_S", 20.0)
    said: list[str] = []
    track_run(["tensorboard"], tmp_path, "a run", {}, said.append)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.2)
    track_run(["aim"], tmp_path, "a run", {}, said.append)
    assert re.fullmatch(r"tensorboard: \w+Error: .*\. The run folder has every number\.", said[1]), said
    assert said[2:] == [
        "aim: it is told now, for 0 seconds at most",
        "aim: it did not take all in 0 seconds. The run folder has every number.",
    ]
