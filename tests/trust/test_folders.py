"""Folders that hold what nobody put there: sweeps and checkpoints among foreign files, and wrong clocks."""

import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import harness.run_folder.run_folder
from harness.errors import InputError
from harness.recipe.file import load_recipe
from harness.run_folder.checkpoint_files import checkpoints
from harness.run_folder.run_folder import RunFolder
from harness.sweep.document import Sweep
from tests.support.commands import exit_status
from tests.support.trust_report import Tried

SWEPT = ["sweep", "smoke", "micro_batch_size=1,2,3", "--napkin", "--out", "sweep"]


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to itself": lambda path: os.symlink(path, path),
    "a link to a device": lambda path: os.symlink("/dev/zero", path),
    "nothing": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_bytes(b"{"),
    "a list": lambda path: path.write_bytes(b"[]"),
    "a file of 2**40 bytes": lambda path: os.truncate(path, 2**40) if path.touch() is None else None,
    "many brackets": lambda path: path.write_bytes(b'{"key": [' + b"[]," * 2**20 + b"0]}"),
    "deep": lambda path: path.write_bytes(b"[" * 10**6),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_in_a_sweep(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tried: Tried,
) -> None:
    """In the place of a cell it is done again (or said why not); under any other name it is left alone."""
    monkeypatch.chdir(tmp_path)
    assert exit_status(*SWEPT) == 0
    first = Sweep.read(tmp_path / "sweep" / "sweep.json")
    cells = sorted((tmp_path / "sweep" / "cells").iterdir())
    assert len(cells) == 4
    for path in (tmp_path / "sweep" / "notes.txt", tmp_path / "sweep" / "cells" / "other.json"):
        FOREIGN[kind](path)
    cells[0].unlink()
    FOREIGN[kind](cells[0])
    (tmp_path / "sweep" / "sweep.json").unlink()
    FOREIGN[kind](tmp_path / "sweep" / "sweep.json")
    capfd.readouterr()
    status = exit_status(*SWEPT)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    if kind in ("a pipe", "a folder", "a link to a device"):
        assert status == 2, said
        assert "cannot write" in said
    else:
        assert status == 0, said
        again = Sweep.read(tmp_path / "sweep" / "sweep.json")
        assert [cell.label for cell in again.cells] == [cell.label for cell in first.cells]
        assert os.path.lexists(tmp_path / "sweep" / "cells" / "other.json")
    fault = (
        "pipes, folders, links, huge and broken files in the place of a cell, of sweep.json, and beside them"
    )
    tried(
        "Folders of sweeps", fault, "done again, or exit 2 naming what cannot be replaced; never waited for"
    )


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_among_checkpoints(kind: str, tmp_path: Path, tried: Tried) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "step-4").mkdir(parents=True)
    for name in ("notes", "step-x", "step-", ".step-5.partial", "step-4.bak"):
        FOREIGN[kind](folder / name)
    assert checkpoints(folder) == [folder / "step-4"]
    FOREIGN[kind](folder / "step-9")
    run = RunFolder(None, "smoke", load_recipe("smoke")[1], resume=tmp_path)
    assert run.checkpoint == folder / "step-9"
    from harness.checkpoint.checkpoint import read

    assert run.checkpoint is not None

    with pytest.raises(InputError, match=r"--resume: .*step-9"):
        read(run.checkpoint, load_recipe("smoke")[1])
    tried(
        "Folders of sweeps",
        "the same among the checkpoints of a run",
        "left alone; the last is refused by name",
    )


def test_a_clock_that_goes_back_takes_no_folder_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("smoke")[1]
    now = [datetime(2026, 3, 29, 2, 59, 59)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return now[0]

    monkeypatch.setattr(harness.run_folder.run_folder, "datetime", Clock)
    made = []
    for jump in (
        timedelta(0),
        timedelta(hours=-1),
        timedelta(hours=1),
        timedelta(days=-20_000),
        timedelta(days=20_000),
    ):
        now[0] += jump
        run = RunFolder(None, "smoke", recipe)
        run.log({"step": 0})
        made.append(run.path)
    assert len(set(made)) == 5
    lines = [json.loads((path / "log.jsonl").read_text()) for path in made]
    assert lines == [{"step": 0}] * 5
    tried(
        "Clocks",
        "a clock that jumps by an hour and by decades between runs",
        "every run has its own folder",
        times=5,
    )
