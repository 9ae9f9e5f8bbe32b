"""Sweeps: which cells there are, what survives, what is said about the curves."""

import csv
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import harness.sweep.cell
import harness.sweep.processes
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe import Recipe, load_recipe
from harness.step_profile import HardwareSummary, MemoryStats, PhaseStats, StepProfile, StepStats
from harness.sweep import Row, as_markdown, run_cells
from harness.sweep.cell import Outcome, answer, out_of_memory_reason
from harness.sweep.curves import curves_of
from harness.sweep.document import SweptCell, sweep_of
from harness.sweep.folder import (
    cell_key,
    cell_path,
    default_folder,
    read_outcome,
    sole_sweep_in,
    write_outcome,
)
from harness.sweep.launchers.launcher import Question
from harness.sweep.plan import Cell, Plan, plan_sweep, spelled
from tests.support.commands import Call
from tests.support.places import LLAMA

GIB = 2**30


@pytest.fixture
def call(call: Call, tmp_path: Path) -> Call:
    """In a folder that holds tiny.yaml."""
    (tmp_path / "tiny.yaml").write_text(f"# tiny\nmodel: {LLAMA}\nprecision: fp32\nseq_len: 32\nsteps: 1\n")
    return call


def labels(plan: Plan) -> list[str]:
    return [cell.label for cell in plan.cells]


# which cells


def test_one_field_at_a_time_from_the_base_which_is_there_once():
    plan = plan_sweep("smoke", ["micro_batch_size=2,4,8", "precision=fp32,bf16"], "simulated")
    assert load_recipe("smoke")[1].micro_batch_size == 4
    assert load_recipe("smoke")[1].precision == "fp32"
    assert labels(plan) == ["base", "micro_batch_size=2", "micro_batch_size=8", "precision=bf16"]
    assert plan.cells[1].recipe == load_recipe("smoke", ["micro_batch_size=2"])[1]


def test_a_grid_is_the_product():
    plan = plan_sweep(
        "smoke", ["micro_batch_size=1,2", "precision=fp32,bf16", "seq_len=64"], "napkin", grid=True
    )
    assert labels(plan) == [f"micro_batch_size={b}, precision={p}" for b in (1, 2) for p in ("fp32", "bf16")]
    assert {cell.recipe.seq_len for cell in plan.cells if cell.recipe} == {64}


def test_lists_are_joined_by_a_plus_sign_or_written_in_brackets():
    plus = plan_sweep("smoke", ["offload=none,activations,activations+optimizer"], "napkin")
    brackets = plan_sweep("smoke", ["offload=[],[activations],[activations,optimizer]"], "napkin")
    assert [cell.recipe for cell in plus.cells] == [cell.recipe for cell in brackets.cells]
    assert labels(plus) == ["base", "offload=activations", "offload=activations+optimizer"]


def test_devices_can_be_swept():
    plan = plan_sweep("smoke", ["hardware=h100,l4"], "napkin")
    assert [(cell.label, cell.hardware) for cell in plan.cells] == [("base", "h100"), ("hardware=l4", "l4")]


def test_an_impossible_pair_is_a_cell_with_the_reason():
    plan = plan_sweep("llama-3.1-8b-qlora", ["adapter=lora,none", "seq_len=64,128"], "napkin")
    (refused,) = [cell for cell in plan.cells if cell.recipe is None]
    assert refused.label == "adapter=none"
    assert "quantization" in str(refused.refusal)
    assert "adapter" in str(refused.refusal)
    assert len(plan.cells) == 4


def test_data_that_a_run_refuses_is_a_cell_with_the_reason_or_no_sweep(tmp_path: Path):
    good, bad = tmp_path / "good.jsonl", tmp_path / "preference.jsonl"
    good.write_text('{"text": "one two three"}\n')
    bad.write_text('{"chosen": "a", "rejected": "b"}\n')
    plan = plan_sweep("smoke", [f"data={good},{bad}", "seq_len=64,128"], "napkin", grid=True)
    refused = [cell for cell in plan.cells if cell.recipe is None]
    assert [cell.changes["data"] for cell in refused] == [str(bad)] * 2
    assert len(plan.cells) == 4
    assert "preference training" in str(refused[0].refusal)
    for arguments in ([f"data={bad}", "seq_len=64,128"], [f"data={bad}", "model=mixtral-8x7b,llama-3.1-8b"]):
        with pytest.raises(InputError, match="preference training"):
            plan_sweep("smoke", arguments, "napkin")


# what is kept


def sweep_in(folder: Path, plan: Plan) -> list[Row]:
    with sole_sweep_in(folder):
        return list(run_cells(plan, folder))


@pytest.fixture
def plan() -> Plan:
    return plan_sweep("smoke", ["micro_batch_size=1,2,3", "adapter=none,lora"], "napkin")


def test_what_is_done_is_not_done_again(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch):
    first = sweep_in(tmp_path, plan)
    files = {path: path.read_bytes() for path in (tmp_path / "cells").iterdir()}
    assert len(files) == len(plan.cells) == 5
    assert [row.kept for row in first] == [False] * 5

    asked: list[Recipe] = []

    def counted(kind: Any, recipe: Recipe, *rest: Any) -> Outcome:
        asked.append(recipe)
        return answer(kind, recipe, *rest)

    monkeypatch.setattr(harness.sweep.processes, "answer", counted)
    again = sweep_in(tmp_path, plan)
    assert asked == []
    assert [row.kept for row in again] == [True] * 5
    assert [row.outcome for row in again] == [row.outcome for row in first]
    more = plan_sweep("smoke", ["micro_batch_size=1,2,3,5"], "napkin")
    assert [row.cell.label for row in sweep_in(tmp_path, more) if not row.kept] == ["micro_batch_size=5"]
    assert [recipe.micro_batch_size for recipe in asked] == [5]


@pytest.mark.parametrize("damage", ["remove", "cut", "another cell's", "not JSON", "a list"])
def test_a_lost_or_damaged_cell_is_done_again_and_no_other(tmp_path: Path, plan: Plan, damage: str):
    first = {row.cell.label: row.outcome for row in sweep_in(tmp_path, plan)}
    key = cell_key(plan.cells[2], "napkin")
    path = cell_path(tmp_path, key)
    match damage:
        case "remove":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-300])
        case "another cell's":
            path.write_bytes(cell_path(tmp_path, cell_key(plan.cells[1], "napkin")).read_bytes())
        case "not JSON":
            path.write_bytes(b"\x80\x04\x95")
        case "a list":
            path.write_text("[1]")
    again = sweep_in(tmp_path, plan)
    assert [row.cell.label for row in again if not row.kept] == [plan.cells[2].label]
    for row in again:
        assert row.outcome.profile is not None
        assert row.outcome.profile.memory == first[row.cell.label].profile.memory  # type: ignore[union-attr]
    assert len(list((tmp_path / "cells").iterdir())) == len(plan.cells)


def test_what_failed_or_was_refused_is_tried_again(tmp_path: Path, plan: Plan):
    for cell, status in zip(plan.cells, ("ok", "out_of_memory", "refused", "failed"), strict=False):
        assert cell.recipe is not None
        outcome = answer("napkin", cell.recipe, cell.hardware)
        outcome = Outcome(status, None if status == "ok" else "a reason", outcome.profile)
        (tmp_path / "cells").mkdir(exist_ok=True)
        write_outcome(tmp_path, cell_key(cell, "napkin"), cell, outcome)
    kept = {row.cell.label for row in sweep_in(tmp_path, plan) if row.kept}
    assert kept == {plan.cells[0].label, plan.cells[1].label}


@pytest.mark.parametrize("where", ["id", "home"])
def test_a_config_that_changed_is_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of an id it is the one in the cache; of a path below ~ the one there: as every answer reads them."""
    folder = tmp_path / ("models--nobody--tiny/snapshots/1" if where == "id" else "mine")
    folder.mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    cell = Cell({}, Recipe(model="nobody/tiny" if where == "id" else "~/mine"), "h100")
    keys = []
    for layers in (2, 3):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
        keys.append(cell_key(cell, "napkin"))
    assert keys[0] != keys[1]


def test_the_key_follows_all_that_the_answer_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tmp_path / "config.json"
    config.write_bytes(LLAMA.read_bytes())
    recipe = Recipe(model=str(config))
    keys = {
        cell_key(Cell({}, recipe, "h100"), "napkin"),
        cell_key(Cell({}, recipe, "h100"), "simulated"),
        cell_key(Cell({}, recipe, "l4"), "napkin"),
        cell_key(Cell({}, recipe.model_copy(update={"seed": 1}), "h100"), "napkin"),
        cell_key(Cell({}, recipe, None), "measured", "cpu"),
        cell_key(Cell({}, recipe, None), "measured", "cuda:0"),
    }
    assert cell_key(Cell({"seed": 0}, recipe, "h100"), "napkin") in keys  # however it is spelled
    assert len(keys) == 6
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    keys.add(cell_key(Cell({}, recipe, "h100"), "simulated"))
    monkeypatch.setattr("harness.sweep.folder.installed_version", lambda name: "99.0")
    keys.add(cell_key(Cell({}, recipe, "h100"), "simulated"))
    config.write_text(LLAMA.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    keys.add(cell_key(Cell({}, recipe, "h100"), "simulated"))
    assert len(keys) == 9


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path):
    a, b = tmp_path / "a", tmp_path / "b"
    occupied = pytest.raises(InputError, match=r"process \d+ on .*, writes there")
    with sole_sweep_in(a), sole_sweep_in(b), occupied, sole_sweep_in(a):
        pass
    with sole_sweep_in(tmp_path / "a"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the folder"), sole_sweep_in(tmp_path / "file"):
        pass


def test_a_run_s_folder_is_no_sweep_s(tmp_path: Path, call: Call):
    (tmp_path / "profile.json").write_text("{}")
    status, _, err = call("sweep", "smoke", "micro_batch_size=1,2", "--napkin", "--out", tmp_path)
    assert status == 2
    assert "it holds a profile.json, of a run. Give another folder" in err
    assert not (tmp_path / "cells").exists()


def test_the_same_question_has_the_same_folder():
    def folder(*arguments: str, **options: Any) -> Path:
        return default_folder(plan_sweep("smoke", arguments, "napkin", **options))

    assert folder("seed=1,2") == folder("seed=1,2,3")  # more values go on where the others ended
    different = [("seed=1,2", "seq_len=64"), ("seed=1,2", "hardware=l4"), ("steps=1,2",)]
    assert (
        len({folder("seed=1,2"), folder("seed=1,2", grid=True), *(folder(*given) for given in different)})
        == 5
    )


# processes


def crashing(kind: str, recipe: Recipe, *rest: Any) -> Outcome:
    match recipe.micro_batch_size:
        case 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 3:
            os._exit(7)
        case 4:
            raise AssertionError("never reached: answer() catches everything")
    return answer("napkin", recipe, "h100")


def crashing_cell(*arguments: Any) -> None:
    harness.sweep.cell.answer = crashing
    harness.sweep.cell.answer_in_process(*arguments)


def test_a_crash_is_a_row_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness.sweep.processes, "answer_in_process", crashing_cell)
    rows = sweep_in(tmp_path, plan_sweep("smoke", ["micro_batch_size=1,2,3", "steps=1"], "simulated"))
    found = {row.cell.label: (row.outcome.status, row.outcome.reason) for row in rows}
    assert found == {
        "base": ("failed", "the process of the cell ended with status 1 and no answer"),
        "micro_batch_size=1": ("ok", None),
        "micro_batch_size=2": ("failed", "the process of the cell was ended by SIGSEGV"),
        "micro_batch_size=3": ("failed", "the process of the cell ended with status 7 and no answer"),
    }


def sleeping_cell(sender: Any, cell: Cell, kind: str, pids: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (Path(pids) / str(os.getpid())).touch()
    time.sleep(60)


def test_an_interrupt_ends_the_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setattr(harness.sweep.processes, "answer_in_process", sleeping_cell)

    def interrupt(ready: Any, *_: Any) -> Any:
        deadline = time.monotonic() + 60
        while len(list(pids.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.sweep.processes, "connection", SimpleNamespace(wait=interrupt))
    finished = run_cells(plan_sweep("smoke", ["seed=1,2,3"], "simulated"), tmp_path, jobs=2, device=str(pids))
    with pytest.raises(KeyboardInterrupt):
        next(finished)
    assert len(list(pids.iterdir())) == 2
    for pid in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.name), 0)


def test_whatever_goes_wrong_has_its_reason(monkeypatch: pytest.MonkeyPatch):
    recipe = load_recipe("smoke")[1]

    def ending(error: BaseException) -> Outcome:
        def fails(*_: Any) -> StepProfile:
            raise error

        monkeypatch.setattr(harness.sweep.cell, "measured", fails)
        return answer("measured", recipe, None)

    assert ending(InputError("no such thing.")).reason == "no such thing."
    assert ending(InputError("x")).status == "refused"
    assert ending(MemoryError()).status == "out_of_memory"
    broken = ending(ZeroDivisionError("by\nzero"))
    assert (broken.status, broken.reason) == ("failed", "ZeroDivisionError: by")
    assert "Traceback" in str(broken.traceback)
    assert Outcome.from_json(json.loads(json.dumps(broken.as_json())), "here") == broken
    with pytest.raises(InputError, match="here is not the outcome"):
        Outcome.from_json(broken.as_json() | {"seconds": -1.0}, "here")


# the command


def test_simulated_cells_and_a_border(call: Call, monkeypatch: pytest.MonkeyPatch):
    def here(launcher: Any, questions: list[Question], *_: Any) -> Iterator[tuple[Question, Outcome]]:
        for asked in questions:
            assert asked.cell.recipe is not None
            yield asked, answer("simulated", asked.cell.recipe, asked.cell.hardware)

    monkeypatch.setattr(harness.sweep.processes, "outcomes", here)  # torch is imported here already
    # 8 million tokens: their fp32 logits alone, 264 each, are 8.6 GB
    values = ("micro_batch_size=1,2,4000", "seq_len=2048", "master_weights=false,true", "hardware=l4")
    status, out, err = call("sweep", "tiny.yaml", *values, "--out", "made", "--json")
    document = json.loads(out)
    assert status == 0
    assert [cell["status"] for cell in document["cells"]] == ["ok", "ok", "out_of_memory", "refused"]
    assert document["cells"][2]["reason"].startswith("out of memory in ")
    assert document["complete"]
    assert document["curves"][0]["largest_fitting"] == 2
    assert document["curves"][0]["smallest_out_of_memory"] == 4000
    assert re.search(r"\[4/4\] micro_batch_size=\d+: ", err)
    assert "s left" in err
    assert "runs out at micro_batch_size 4000 and fits at 2" in err
    assert sorted(path.name for path in Path("made").iterdir() if not path.name.startswith(".")) == [
        *("cells", "report.html", "sweep.csv", "sweep.json", "sweep.md")
    ]
    assert json.loads(Path("made/sweep.json").read_text()) == document
    assert len(list(Path("made/cells").iterdir())) == 4


def test_the_tables_hold_the_profiles_numbers(call: Call):
    arguments = ("sweep", "smoke", "micro_batch_size=1,2", "--napkin", "--out", "made")
    status, out, _ = call(*arguments, "--csv")
    assert status == 0
    lines = list(csv.DictReader(io.StringIO(out)))
    for line, value in zip(lines, (4, 1, 2), strict=True):
        profile = predict(load_recipe("smoke", [f"micro_batch_size={value}"])[1], find_hardware("h100"))
        assert int(line["micro_batch_size"]) == value
        assert int(line["peak_allocated_bytes"]) == profile.memory.peak_allocated_bytes
        assert int(line["activations_bytes"]) == profile.memory.at_peak.activations_bytes
        assert float(line["tokens_per_s"]) == profile.step.tokens_per_s
        assert float(line["step_s"]) == profile.step.time_s.median
    assert Path("made/sweep.csv").read_text() == out
    status, out, _ = call(*arguments, "--markdown")
    assert out == Path("made/sweep.md").read_text()
    peak = int(lines[1]["peak_allocated_bytes"])
    (row,) = [line for line in out.splitlines() if "micro\\_batch\\_size=1 " in line]
    assert f"| {peak / 2**20:,.1f} MiB |" in row
    status, out, _ = call(*arguments)
    assert status == 0
    assert f"{peak / 2**20:,.1f} MiB" in out
    assert "sweep folder: made" in out


def test_none_is_faster_with_as_little_memory(tmp_path: Path):
    values = ["micro_batch_size=1,2,4", "gradient_checkpointing=true,false", "loss=standard,fused_linear"]
    swept = plan_sweep("tinyllama-lora", values, "napkin", grid=True)
    sweep = sweep_of(swept, sweep_in(tmp_path, swept))

    def beaten(cell: SweptCell) -> bool:
        mine = cell.peak_allocated_bytes or 0, -(cell.tokens_per_s or 0)
        others = ((c.peak_allocated_bytes or 0, -(c.tokens_per_s or 0)) for c in sweep.cells)
        return any(size <= mine[0] and slow <= mine[1] and (size, slow) != mine for size, slow in others)

    best = sweep.best_for_memory()
    assert 1 < len(best) < len(sweep.cells)
    assert {cell.label for cell in best} == {cell.label for cell in sweep.cells if not beaten(cell)}
    assert sweep.answers[-1].startswith(
        f"The fastest of those that take as little memory, from the smallest: {best[0].label} ("
    )


def test_a_measured_cell_is_a_measurement(call: Call):
    arguments = ("micro_batch_size=1,2", "warmup_steps=0", "--measure", "--device", "cpu", "--json")
    status, out, err = call("sweep", "tiny.yaml", *arguments)
    document = json.loads(out)
    assert status == 0, err
    one, two = (cell["at_peak"]["inputs_bytes"] for cell in document["cells"])
    assert two == 2 * one > 0
    assert document["cells"][0]["step_s"] > 0
    assert Path("profiles/sweeps").is_dir()
    assert re.search(r"sweep folder: profiles/sweeps/tiny-measured-micro_batch_size-\w{6}", err)


def test_a_crash_ends_with_status_1(call: Call, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> Outcome:
        return Outcome("failed", "a bug", traceback="Traceback")

    monkeypatch.setattr(harness.sweep.processes, "answer", broken)
    status, out, err = call("sweep", "tiny.yaml", "seed=1,2", "--napkin", "--out", "made")
    assert status == 1
    assert "seed=2: a bug" in out
    assert "3 of 3 cells failed" in err


def test_ctrl_c_keeps_what_is_done(call: Call, monkeypatch: pytest.MonkeyPatch):
    def second_is_interrupted(kind: Any, recipe: Recipe, *rest: Any) -> Outcome:
        if recipe.micro_batch_size == 2:
            raise KeyboardInterrupt
        return answer(kind, recipe, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(harness.sweep.processes, "answer", second_is_interrupted)
        status, out, err = call(
            "sweep", "tiny.yaml", "micro_batch_size=1,2,3", "--napkin", "--out", "made", "--json"
        )
    assert status == 130
    assert "1 of 3 cells are done; run the same command to go on" in err
    assert not json.loads(out)["complete"]
    assert [cell["label"] for cell in json.loads(out)["cells"]] == ["micro_batch_size=1 (base)"]
    status, out, err = call(
        "sweep", "tiny.yaml", "micro_batch_size=1,2,3", "--napkin", "--out", "made", "--json"
    )
    assert status == 0
    assert "[1/3] base: " in err
    assert "done before" in err
    assert len(json.loads(out)["cells"]) == 3


# what the curves say


def measured(value: int, peak_bytes: float, tokens_per_s: float, **fields: Any) -> Outcome:
    """A profile with these numbers, of a device with 80 GiB."""
    return Outcome(
        "ok",
        profile=StepProfile(
            source="measured",
            recipe={},
            hardware=HardwareSummary(name="x", kind="cuda", memory_bytes=80 * GIB),
            memory=MemoryStats(
                kind="cuda_allocator", peak_allocated_bytes=int(peak_bytes), cuda_context_bytes=GIB
            ),
            step=StepStats(tokens_per_s=tokens_per_s, **fields),
        ),
    )


def swept(field: str, outcomes: dict[int, Outcome]) -> tuple[Plan, list[Row]]:
    values = ",".join(map(str, outcomes))
    plan = plan_sweep(
        "smoke",
        [f"{field}={values}", "seq_len=1024"] if field != "seq_len" else [f"seq_len={values}"],
        "measured",
        grid=True,
    )
    return plan, [Row(cell, outcomes[cell.changes[field]]) for cell in plan.cells]


def test_the_line_the_border_and_the_answer_by_hand():
    # 10 GiB and 1 MiB a token of 1024 · batch: 11, 12, 14, 18 GiB; full at (80 - 1 - 10) GiB = 69 rows
    batches = {
        8: measured(8, 18 * GIB, 2600, bound="compute"),
        1: measured(1, 11 * GIB, 1000, bound="memory"),
        4: measured(4, 14 * GIB, 2500, bound="compute"),
        2: measured(2, 12 * GIB, 1900, bound="memory"),
        128: Outcome("out_of_memory", "out of memory in backward"),
    }
    plan, rows = swept("micro_batch_size", batches)
    (curve,) = curves_of(plan, rows)
    assert [rows[place].cell.changes["micro_batch_size"] for place in curve.cells] == [1, 2, 4, 8, 128]
    assert curve.line is not None
    assert curve.line.constant_bytes == pytest.approx(10 * GIB)
    assert curve.line.per_token_bytes == pytest.approx(2**20)
    assert curve.line.r_squared == pytest.approx(1)
    assert curve.line.largest_residual_bytes == pytest.approx(0, abs=10)
    assert curve.line.full_at == pytest.approx(69)
    assert (curve.largest_fitting, curve.smallest_out_of_memory) == (8, 128)
    assert curve.answer == (
        "2x micro_batch_size gives 1.90x throughput (1 → 2), 2x gives 1.04x (4 → 8): "
        "compute bound from micro_batch_size 4. Memory is 10.00 GiB and 1.0 MiB for each token of a micro "
        "batch (R² 1); it runs out at micro_batch_size 128 and fits at 8."
    )


def test_what_is_no_line_is_not_called_one():
    # 1, 4, 16 and 64 GiB: the square of the length
    lengths = {n * 1024: measured(n, n * n * GIB, 1000 - n) for n in (1, 2, 4, 8)}
    (curve,) = curves_of(*swept("seq_len", lengths))
    assert curve.line is not None
    # R² = Sxy² / (Sxx · Syy); x - 3.75: -2.75 -1.75 0.25 4.25; y - 21.25: -20.25 -17.25 -5.25 42.75
    assert curve.line.r_squared == pytest.approx(266.25**2 / (28.75 * 2562.75))
    assert not curve.line.good
    assert "Memory does not follow a line (R² 0.962" in curve.answer
    assert "by this line" not in curve.answer


def test_two_points_make_no_line_and_their_memory_is_said():
    (curve,) = curves_of(*swept("micro_batch_size", {1: measured(1, GIB, 1), 2: measured(2, 2 * GIB, 2)}))
    assert curve.line is None
    assert curve.answer.endswith("Memory is 1.00 GiB at micro_batch_size 1 and 2.00 GiB at 2.")


def test_a_field_that_is_no_size_of_a_batch_has_its_memory_said_too():
    ranks = {
        64: measured(64, 3 * GIB, 90),
        16: measured(16, 2 * GIB, 100),
        256: Outcome("out_of_memory", "out of memory in optimizer_step"),
    }
    (curve,) = curves_of(*swept("lora_rank", ranks))
    assert curve.answer.endswith(
        "Memory is 2.00 GiB at lora_rank 16 and 3.00 GiB at 64; it runs out at lora_rank 256 and fits at 64."
    )


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ([100, 200, 400, 800], "still rising at 8"),
        ([100, 190, 195, 196], "it no longer rises from micro_batch_size 2 on"),
        ([100, 101, 102, 103], "it no longer rises from micro_batch_size 1 on"),
        ([100, 101, 150, 152], "it no longer rises from micro_batch_size 4 on"),
    ],
)
def test_where_no_profile_says_what_bounds_it_the_curve_does(speeds: list[float], words: str):
    batches = {2**n: measured(2**n, GIB, speed) for n, speed in enumerate(speeds)}
    (curve,) = curves_of(*swept("micro_batch_size", batches))
    assert words in curve.answer


def test_toggles_are_compared_with_the_base():
    plan = plan_sweep(
        "smoke", ["gradient_checkpointing=false,true", "loss=standard,fused_linear"], "measured"
    )
    outcomes = [measured(0, 8 * GIB, 1000), measured(0, 2 * GIB, 750), Outcome("failed", "a bug")]
    kernels = {"product": 0.08, "copy": 0.01}, {"product": 0.11, "copy": 0.01}
    for outcome, kernels_s, step_s in zip(outcomes, kernels, (0.1, 0.12), strict=False):
        assert outcome.profile is not None
        outcome.profile.step.time_s.median = step_s
        outcome.profile.phases["forward"] = PhaseStats(kernels_s=kernels_s)
    rows = [Row(cell, outcome) for cell, outcome in zip(plan.cells, outcomes, strict=True)]
    checkpointing, loss = (curve.answer for curve in curves_of(plan, rows))
    change = "gradient_checkpointing=true gives 0.25x memory (-6.00 GiB) and 0.75x throughput"
    change += " (a step of 100.0 ms: products +30.0, device idle -10.0 ms)"
    assert checkpointing == f"Against gradient_checkpointing=false: {change}."
    assert loss == "Against loss=standard: loss=fused_linear failed."


def test_numbers_from_zero_are_compared_and_not_scaled():
    plan = plan_sweep("llama-3.1-8b-lora", ["lora_dropout=0,0.1"], "measured")
    rows = [Row(cell, measured(0, (n + 1) * GIB, 1000 / (n + 1))) for n, cell in enumerate(plan.cells)]
    (curve,) = curves_of(plan, rows)
    assert curve.answer == (
        "Against lora_dropout=0.0: lora_dropout=0.1 gives 2.00x memory (+1.00 GiB) and 0.50x throughput."
    )


def test_a_grid_has_a_curve_for_every_value_of_the_others():
    plan = plan_sweep("smoke", ["micro_batch_size=1,2,4", "precision=fp32,bf16"], "napkin", grid=True)
    curves = curves_of(
        plan, [Row(cell, answer("napkin", cell.recipe, "h100")) for cell in plan.cells if cell.recipe]
    )
    assert [(curve.field, curve.others, len(curve.cells)) for curve in curves] == [
        ("micro_batch_size", {"precision": "fp32"}, 3),
        ("micro_batch_size", {"precision": "bf16"}, 3),
        *(("precision", {"micro_batch_size": n}, 2) for n in (1, 2, 4)),
    ]
    assert curves[0].answer.startswith("With precision=fp32: 2x micro_batch_size gives ")


def test_hostile_text_stays_text_in_markdown(plan: Plan):
    rows = [
        Row(cell, Outcome("failed", "a | b\n<script>alert(1)</script> [x](http://y) `z`"))
        for cell in plan.cells
    ]
    text = as_markdown(sweep_of(plan, rows))
    assert "<script>" not in text
    assert "\\| b &lt;script&gt;" in text
    assert "\\[x\\](http" in text
    assert all(line.count(" | ") == text.splitlines()[0].count(" | ") for line in text.splitlines()[2:4])


def test_napkin_out_of_memory_says_how_large_the_peak_is():
    recipe = load_recipe("llama-3.1-8b-full-bf16")[1]
    outcome = answer("napkin", recipe, "l4")
    assert outcome.status == "out_of_memory"
    assert outcome.profile is not None
    peak = outcome.profile.memory.peak_allocated_bytes or 0
    assert out_of_memory_reason(outcome.profile).endswith(f"the peak is {peak / GIB:,.2f} GiB")


def test_values_are_spelled_as_they_are_typed():
    assert [spelled(v) for v in (True, None, [], ["a", "b"], 2, "bf16", 1e-5)] == [
        *("true", "null", "none", "a+b", "2", "bf16", "1e-05")
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"reason": []},
        {"seconds": "long"},
        {"status": "perfect"},
        {"status": "ok", "reason": "it failed"},
        {"profile": {"schema_version": 1}},
        {"profile": []},
        {"profile": None},
    ],
    ids=str,
)
def test_a_kept_cell_that_is_none_is_done_anew(change: dict[str, Any], tmp_path: Path, plan: Plan):
    (row, *_) = sweep_in(tmp_path, plan)
    key = cell_key(row.cell, "napkin")
    document = json.loads(cell_path(tmp_path, key).read_bytes())
    document["outcome"] |= change
    cell_path(tmp_path, key).write_text(json.dumps(document))
    assert read_outcome(tmp_path, key) is None
    assert [again.cell for again in sweep_in(tmp_path, plan) if not again.kept] == [row.cell]


@pytest.mark.parametrize(
    "other",
    [
        ("sweep", "tiny.yaml", "seed=1,2", "--simulate"),
        ("sweep", "tiny.yaml", "micro_batch_size=1,2", "--napkin"),
        ("sweep", "smoke", "seed=1,2", "--napkin"),
    ],
    ids=["kind", "fields", "recipe"],
)
def test_a_folder_keeps_the_tables_of_another_question(call: Call, other: tuple[str, ...]) -> None:
    assert call("sweep", "tiny.yaml", "seed=1,2", "--napkin", "--out", "made")[0] == 0
    before = Path("made/sweep.json").read_bytes()
    status, _, err = call(*other, "--out", "made")
    assert status == 2
    assert "--out made: it has a napkin sweep of tiny over seed, another question" in err
    assert Path("made/sweep.json").read_bytes() == before
    assert call("sweep", "tiny.yaml", "seed=1,2,3", "--napkin", "--out", "made")[0] == 0
