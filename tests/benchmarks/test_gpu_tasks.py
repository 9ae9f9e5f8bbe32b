"""Pieces of the hardware programme in processes of their own: what may go wrong with one, and with a part."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_programme import __main__ as gpu
from benchmarks.gpu_programme import tasks as gpu_tasks
from benchmarks.gpu_programme.__main__ import PARTS, chosen_pieces, how_to_start, main, run_part
from benchmarks.gpu_programme.tasks import Context, Piece, Result, modules_of, run_pieces
from harness.errors import InputError
from harness.recipe.recipe import Recipe

FORK = "spawn" if sys.platform == "darwin" else "fork"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", True, tmp_path)


# What may go wrong with a piece. Functions of this module: a new process can import them.


def fine(context: Context) -> Result:
    return {"answer": 42}


def broken(context: Context) -> Result:
    raise ZeroDivisionError("no such number")


def refused(context: Context) -> Result:
    raise InputError("the recipe cannot be.")


def shot(context: Context) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def endless(context: Context) -> Result:
    time.sleep(600)
    return {}


def hungry(context: Context) -> Result:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


def nameless(context: Context) -> Result:
    return {"loss": float("nan")}


def looking_back(context: Context) -> Result:
    done = json.loads((context.out / "validate.json").read_bytes())["results"]
    return {"written": [result["name"] for result in done]}


def large(context: Context) -> Result:
    return {"text": "x" * 1000}


def run(pieces: list[Piece], context: Context, seconds: float = 60.0) -> dict[str, Result]:
    return {r["name"]: r for r in run_pieces(pieces, context, FORK, until_s=time.monotonic() + seconds)}


def test_a_piece_that_fails_harms_no_other(context):
    broken_ones = {name: globals()[name] for name in ("broken", "refused", "shot", "hungry", "nameless")}
    pieces = [Piece(name, function) for name, function in broken_ones.items()]
    found = run([*pieces, Piece("endless", endless, limit_s=0.5), Piece("fine", fine)], context)
    assert {name: result["status"] for name, result in found.items()} == {
        "broken": "error",
        "refused": "error",
        "shot": "died",
        "hungry": "oom",
        "nameless": "error",
        "endless": "timeout",
        "fine": "ok",
    }
    assert found["broken"]["reason"] == "ZeroDivisionError: no such number"
    assert "in broken" in found["broken"]["traceback"]
    assert found["refused"]["reason"] == "the recipe cannot be."
    assert "SIGKILL" in found["shot"]["reason"]
    assert found["hungry"]["reason"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert found["endless"]["seconds"] < 600  # it sleeps so long
    assert found["fine"]["result"] == {"answer": 42}


def test_each_result_is_in_the_file_before_the_next_begins(context):
    pieces = [Piece("first", fine), Piece("second", looking_back), Piece("third", looking_back)]
    document = run_part("validate", context, FORK, {}, pieces, budget_s=60)  # one piece at a time
    assert [r["result"].get("written") for r in document["results"]] == [None, ["first"], ["first", "second"]]
    assert json.loads((context.out / "validate.json").read_bytes()) == document


def test_what_there_is_no_time_for_is_said(context):
    found = run([Piece("fine", fine)], context, seconds=-1)
    assert found["fine"] == {"name": "fine", "status": "not run", "reason": "this part's time was used up"}


def test_a_result_too_large_for_the_file_is_left_out(context, monkeypatch):
    monkeypatch.setattr(gpu, "MAX_FILE_BYTES", 700)
    document = run_part("oom", context, FORK, {}, [Piece("large", large), Piece("fine", fine)], budget_s=60)
    assert [(r["name"], r["status"]) for r in document["results"]] == [("large", "error"), ("fine", "ok")]
    assert (context.out / "oom.json").stat().st_size <= 700


def test_missing_packages_are_skipped_by_name(context, monkeypatch):
    monkeypatch.setattr(gpu_tasks, "is_installed", lambda module: False)
    pieces = [piece for part in PARTS for piece in chosen_pieces(part, context, []) if piece.modules]
    assert len(pieces) > 60
    reasons = {result["name"]: result["reason"] for result in run(pieces, context).values()}
    assert reasons["8b-2-layers-nf4-lora"] == "needs peft and bitsandbytes, not installed here"
    assert "needs an NVIDIA GPU" in reasons["flash-attention-2"]
    assert reasons["1b-bf16.sft-trainer.1"] == "needs trl and datasets, not installed here"
    on_gpu = Context("cuda", False, context.out)
    (flash,) = [piece for piece in chosen_pieces("cases", on_gpu, ["flash-attention-2"])]
    assert gpu_tasks.reason_to_skip(flash, on_gpu) == "needs peft and flash-attn, not installed here"
    liger = Recipe(model="llama-3.2-1b", loss="fused_linear")
    assert modules_of(liger) == ("liger_kernel",)


def test_one_broken_part_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    def no_pieces(context: Context) -> list[Piece]:
        raise RuntimeError("nothing to do with you")

    monkeypatch.setattr("benchmarks.gpu_programme.traces.pieces", no_pieces)
    monkeypatch.setattr("benchmarks.gpu_programme.calibrate.pieces", lambda context: [Piece("fine", fine)])
    arguments = ["--tiny", "--part", "traces", "--part", "calibrate", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "traces: failed as a whole: RuntimeError" in capsys.readouterr().out
    failed, done = (json.loads((tmp_path / f"{p}.json").read_bytes()) for p in ("traces", "calibrate"))
    assert (failed["results"][0]["name"], failed["results"][0]["status"]) == ("all", "error")
    assert done["results"][0]["status"] == "ok"


def test_without_a_gpu_the_real_programme_says_what_to_do(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--part", "calibrate", "--out", str(tmp_path)]) == 2
    said, complaint = capsys.readouterr()
    assert "nvidia-smi" in complaint
    assert "--tiny" in complaint
    # both kinds of process came up, and asked torch for the GPU
    methods = ["spawn"] if sys.platform == "darwin" else ["fork", "spawn"]
    assert [line.split()[3] for line in said.splitlines()] == methods
    assert all("CUDA" in line or "NVIDIA" in line for line in said.splitlines())
    assert not list(tmp_path.iterdir())


def test_a_fork_that_cannot_use_the_device_is_replaced_by_a_new_interpreter(context, monkeypatch):
    tried: list[str] = []

    def pretend(pieces, context, start, **others):
        tried.append(start)
        if start == "fork":
            yield {"name": "device", "status": "error", "reason": "cannot re-initialize CUDA"}
        else:
            yield {"name": "device", "status": "ok", "result": {"device": {}}}

    monkeypatch.setattr(gpu, "run_pieces", pretend)
    monkeypatch.setattr(gpu.sys, "platform", "linux")
    assert how_to_start(context) == ("spawn", {"device": {}})
    assert tried == ["fork", "spawn"]


@pytest.mark.parametrize("arguments", [[], ["--all"], ["--out", "here"], ["--all", "--out", "taken/below"]])
def test_bad_arguments_are_one_sentence(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("benchmarks.gpu_programme: ")
