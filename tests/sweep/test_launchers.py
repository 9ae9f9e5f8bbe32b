"""Sweeps whose cells are answered elsewhere: the same results, and none lost."""

import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.errors import InputError
from harness.recipe import Recipe, load_recipe
from harness.step_profile.step_profile import HardwareSummary
from harness.sweep import Row, as_markdown, run_cells, sweep_of
from harness.sweep.cell import Outcome, answer
from harness.sweep.folder import cell_key, sole_sweep_in
from harness.sweep.launchers import ray_tasks
from harness.sweep.launchers.launcher import TRIES, Lost, Question, RemoteLauncher, outcomes
from harness.sweep.launchers.named import launcher_named
from harness.sweep.launchers.remote_answer import answered, assignment
from harness.sweep.plan import Cell, Plan, plan_sweep
from tests.support.commands import Call
from tests.support.places import LLAMA

LOCAL = "cluster=local"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(f"model: {LLAMA}\nprecision: fp32\nseq_len: 32\nsteps: 1\n")
    return plan_sweep(str(recipe), ["micro_batch_size=1,2"], "simulated")


def swept(plan: Plan, folder: Path, launcher: RemoteLauncher | None = None, **options: Any) -> list[Row]:
    """The rows in the plan's order."""
    place = {id(cell): n for n, cell in enumerate(plan.cells)}
    with sole_sweep_in(folder):
        rows = list(run_cells(plan, folder, launcher=launcher, **options))
    return sorted(rows, key=lambda row: place[id(row.cell)])


def told(folder: Path) -> dict[str, Any]:
    """The cells' files by name, without what differs between any two answers: the clock, and in the stacks
    of allocations who called the answer."""
    found: dict[str, Any] = {}
    for path in (folder / "cells").iterdir():
        document = json.loads(path.read_text())
        assert document["outcome"].pop("seconds") > 0
        profile = document["outcome"]["profile"]
        assert profile["provenance"].pop("time")
        for held in profile["top"]:
            callers = [n for n, frame in enumerate(held["stack"]) if "harness/sweep/cell.py" in frame]
            assert bool(callers) == bool(held["stack"])
            del held["stack"][min(callers, default=0) :]
        found[path.name] = document
    return found


# the loop over a launcher


class Scripted:
    """A launcher whose cells end as the script says, the last that was started first."""

    def __init__(self, script: dict[str, list[Outcome | Lost]], room: int = 100) -> None:
        self.script, self.room = script, room
        self.asked: list[str] = []
        self.most = 0
        self.running: list[Question] = []
        self.ended_early: list[str] | None = None

    def start(self, question: Question) -> Any:
        if len(self.running) == self.room:
            raise InputError("the queue is full.")
        self.asked.append(question.key)
        self.running.append(question)
        self.most = max(self.most, len(self.running))
        return question

    def ended(self, running: Sequence[Any]) -> list[Any]:
        assert [*running] == self.running
        return [running[-1]]

    def outcome(self, one: Question) -> Outcome | Lost:
        self.running.remove(one)
        return self.script[one.key].pop(0)

    def close(self, running: Sequence[Any]) -> None:
        self.ended_early = [one.key for one in running]


FINE, GONE = Outcome("failed", "it is not lost"), Lost("the node failed")


def questions(*keys: str) -> list[Question]:
    return [Question(key, Cell({"seed": n}, None, None), "simulated", None) for n, key in enumerate(keys)]


def test_a_lost_cell_is_asked_again_and_no_other() -> None:
    launcher, said = Scripted({"a": [FINE], "b": [GONE, GONE, FINE], "c": [FINE]}), []
    found = list(outcomes(launcher, questions("a", "b", "c"), 2, said.append))
    assert sorted((asked.key, outcome) for asked, outcome in found) == [(key, FINE) for key in "abc"]
    assert sorted(launcher.asked) == ["a", "b", "b", "b", "c"]
    assert said == ["seed=1: the node failed. It is asked again."] * 2
    assert launcher.most == 2
    assert launcher.ended_early == []


def test_a_cell_that_is_lost_every_time_is_a_row_that_says_so() -> None:
    launcher = Scripted({"a": [GONE] * TRIES, "b": [FINE]})
    found = outcomes(launcher, questions("a", "b"), 5, lambda words: None)
    by_key = {asked.key: outcome for asked, outcome in found}
    assert by_key["a"] == Outcome("failed", "asked 3 times: the node failed")
    assert launcher.asked.count("a") == TRIES


def test_an_engine_that_takes_no_more_is_given_fewer() -> None:
    launcher, said = Scripted({key: [FINE] for key in "abcd"}, room=2), []
    assert len(list(outcomes(launcher, questions(*"abcd"), 100, said.append))) == 4
    assert launcher.most == 2
    assert said == ["the queue is full. 2 cells are at work at the same time from now on."]
    with pytest.raises(InputError, match="queue is full"):
        list(outcomes(Scripted({}, room=0), questions("a"), 100, said.append))


def test_what_is_at_work_is_ended_with_the_sweep() -> None:
    launcher = Scripted({key: [FINE] for key in "abc"})
    found = outcomes(launcher, questions(*"abc"), 2, lambda words: None)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert launcher.ended_early == ["a"]


# an answer elsewhere


def question_of(plan: Plan) -> Question:
    cell = plan.cells[0]
    return Question(cell_key(cell, plan.kind), cell, plan.kind, None)


def test_a_machine_that_would_answer_another_question_says_so(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    asked = assignment(question_of(plan), {})
    facts = {**asked.facts, "code": "other", "versions": {**asked.facts["versions"], "torch": "1.0"}}
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    outcome = Outcome.from_json(json.loads(answered(replace(asked, facts=facts))), "the test")
    assert outcome.status == "failed"
    assert "harness's code" in str(outcome.reason)
    assert "torch (2." in str(outcome.reason)
    assert "instead of 1.0)" in str(outcome.reason)
    assert "ALLOC_CONF" not in str(outcome.reason)  # which it was told
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_an_answer_nobody_waited_for_is_found(plan: Plan, tmp_path: Path) -> None:
    """The sweep was killed; its jobs went on."""
    folder = tmp_path / "sweep"
    with sole_sweep_in(folder):
        answered(assignment(question_of(plan), {}, keep_in=folder))
    assert [row.kept for row in swept(plan, folder)] == [True, False]


def test_a_measurement_on_another_machine_is_another_cell() -> None:
    cell = Cell({}, Recipe(model=str(LLAMA)), None)

    def key(*options: str, name: str = "submitit") -> str:
        launcher = launcher_named(name, [LOCAL, *options], Path("x"), "measured", "cpu", print)
        return cell_key(cell, "measured", "cpu", launcher.machine)

    pytest.importorskip("submitit")
    here = cell_key(cell, "measured", "cpu")
    assert len({here, key(), key("slurm_partition=a"), key("slurm_partition=b")}) == 4
    assert key() == key("timeout_min=7") == key("slurm_account=me")


def test_cells_that_were_measured_on_different_devices_are_told_apart() -> None:
    plan = plan_sweep("smoke", ["seed=1,2"], "measured")
    profiles = []
    for name in ("A100", "H100", "H100"):
        profile = answer("napkin", load_recipe("smoke")[1], "h100").profile
        assert profile is not None
        profiles.append(profile.model_copy(update={"hardware": HardwareSummary(name=name, kind="cuda")}))
    rows = [Row(cell, Outcome("ok", None, p)) for cell, p in zip(plan.cells, profiles, strict=True)]
    text = as_markdown(sweep_of(plan, rows))
    assert "different devices: seed=0 (base) on A100; seed=1 on H100; seed=2 on H100." in text.replace(
        "\\", ""
    )
    assert "different devices" not in as_markdown(sweep_of(plan, rows[1:]))


# engines


def test_jobs_of_submitit_leave_what_processes_here_leave(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    here, there = tmp_path / "here", tmp_path / "there"
    expected = swept(plan, here)
    launcher: Any = launcher_named("submitit", [LOCAL], there, "simulated", None, print)
    start, killed, said = launcher.start, [], []

    def killed_at_first(question: Question) -> Any:
        job = start(question)
        if not killed:  # before it can have answered
            controller = psutil.Process(int(job.job_id))
            for process in (*controller.children(recursive=True), controller):
                process.kill()
            killed.append(job)
        return job

    launcher.start = killed_at_first
    rows = swept(plan, there, launcher, jobs=2, tell=said.append)
    assert [row.outcome.status for row in rows] == ["ok", "ok"]
    assert len(said) == 1
    assert f"base: job {killed[0].job_id} ended without an answer" in said[0]
    assert said[0].endswith("It is asked again.")
    assert told(here) == told(there)
    assert as_markdown(sweep_of(plan, rows)) == as_markdown(sweep_of(plan, expected))
    assert [path for path in (there / "jobs").iterdir() if killed[0].job_id not in path.name] == []
    again = launcher_named("submitit", [LOCAL], there, "simulated", None, print)
    assert all(row.kept for row in swept(plan, there, again))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what SLURM would be told: its commands are there, and only write that down."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("sbatch", "srun", "scancel"):
        command = folder / name
        command.write_text(f'#!/bin/sh\ncat "$1" > {folder}/{name}.told\necho Submitted batch job 77\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(("kind", "device", "gpus"), [("measured", "cuda", 1), ("simulated", None, 0)])
def test_slurm_is_asked_for_a_gpu_a_measured_cell(
    kind: Any, device: str | None, gpus: int, slurm: Path, plan: Plan, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    options = ["partition=gpu", "slurm_constraint=h100", "timeout_min=7"]
    launcher = launcher_named("submitit", options, tmp_path / "made", kind, device, print)
    assert launcher.at_once == 100
    assert not (tmp_path / "made").exists()
    assert launcher.start(question_of(plan)).job_id == "77"
    script = (slurm / "sbatch.told").read_text().splitlines()
    asked = [line.removeprefix("#SBATCH --") for line in script if line.startswith("#SBATCH ")]
    assert {f"gpus-per-node={gpus}", "partition=gpu", "constraint=h100", "time=7", "nodes=1"} <= {*asked}
    assert "job-name=harness-made" in asked


@contextmanager
def ray_of_two() -> Iterator[str]:
    """The address of a Ray cluster with two nodes, a processor each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small)
        yield cluster.address
    finally:
        cluster.shutdown()


def test_tasks_of_ray_leave_what_processes_here_leave(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_at_first(told: Any) -> str:
        try:
            (tmp_path / f"seen-{told.question.cell.label}").touch(exist_ok=False)
        except FileExistsError:
            return answered(told)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    here, there, said = tmp_path / "here", tmp_path / "there", []
    swept(plan, here)
    monkeypatch.setattr(ray_tasks, "answered", killed_at_first)
    with ray_of_two() as address:
        kept = signal.getsignal(signal.SIGTERM)
        launcher = launcher_named("ray", [f"address={address}"], there, "simulated", None, said.append)
        assert signal.getsignal(signal.SIGTERM) is kept
        rows = swept(plan, there, launcher, jobs=2, tell=said.append)
    assert [row.outcome.status for row in rows] == ["ok", "ok"]
    assert sorted(words.split(":")[0] for words in said) == ["base", "micro_batch_size=2"]
    assert all("its worker ended without an answer" in words for words in said)
    assert told(here) == told(there)


# bad input


@pytest.fixture
def sweep(call: Call, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    (tmp_path / "tiny.yaml").write_text(f"model: {LLAMA}\nseq_len: 32\n")
    return lambda *arguments: call("sweep", "tiny.yaml", "seed=1,2", *arguments)[::2]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("bogus=1", "does not take its options: Parameter 'bogus'"),
        ("slurm_partitoin=gpu", "Unknown argument 'partitoin'"),
        ("gpus_per_node=many", '"gpus_per_node" expected type'),
        ("tasks_per_node=2", "a cell is one process"),
    ],
)
def test_options_submitit_does_not_take(option: str, words: str, sweep: Any, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    launcher = ["--launcher", "submitit", "--launcher-option", LOCAL]
    status, err = sweep(*launcher, "--launcher-option", option)
    assert status == 2
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_options_ray_does_not_take_and_a_cluster_that_is_not_there(sweep: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"address=127.0.0.1:{unused.getsockname()[1]}"
        for option, words in (
            ("bogus=1", "Invalid option keyword bogus"),
            ("max_calls=2", "the sweep decides that"),
            (nobody, "no cluster answers at 127.0.0.1"),
        ):
            status, err = sweep("--launcher", "ray", "--launcher-option", option)
            assert status == 2
            assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_an_engine_that_is_not_installed_has_its_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    options = [LOCAL] if name == "submitit" else []
    with pytest.raises(InputError, match=rf"pip install 'finetune-harness\[{name}\]'"):
        launcher_named(name, options, tmp_path, "simulated", None, print)
