"""A disk that is full: a sentence with the path and what it needs, and every earlier result as it was."""

import json
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest

from harness.run_folder.checkpoint_files import checkpoints, verify
from harness.step_profile.step_profile import StepProfile
from harness.sweep.cell import Outcome
from tests.support.commands import exit_status
from tests.support.places import LLAMA
from tests.support.trust_report import Tried

ROOM = 200_000
"""Bytes: enough for a recipe, a log and a profile, and not for a snapshot or a page."""
WHY = {"a limit on the size of files": "File too large", "a full tmpfs": "No space left on device"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run of it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.yaml").write_text(f"model: {LLAMA}\nprecision: fp32\nseq_len: 16\nsteps: 3\n")
    assert call(folder, "run", "mine.yaml", "--out", "run") == 0
    return folder


@pytest.fixture(params=WHY)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, Callable]]:
    """What is full, a folder on it, and a context in which it is."""
    if request.param == "a full tmpfs":
        options = ["-t", "tmpfs", "-o", f"size={ROOM + 100_000}", "tmpfs"]
        mounted = subprocess.run(["mount", *options, str(tmp_path)], capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"mounting a tmpfs is for root: {mounted.stderr.strip()}")
        try:
            yield request.param, tmp_path, _as_it_is
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
    else:
        yield request.param, tmp_path, _limited


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _limited() -> Iterator[None]:
    """No file beyond ROOM bytes: write() fails as it does when the disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def call(folder: Path, *arguments: str) -> int:
    with chdir(folder):
        return exit_status(*arguments)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CASES = {
    "run": (["run", "{made}/mine.yaml", "--out", "new"], "new/snapshot.pickle"),
    "run with checkpoints": (
        ["run", "{made}/mine.yaml", "--no-snapshot", "checkpoint_every=2", "--out", "new"],
        "new/checkpoints/step-2",
    ),
    "report": (["report", "{made}/run", "--out", "earlier/page.html"], "earlier/page.html"),
    "snapshot to-json": (
        ["snapshot", "to-json", "{made}/run/snapshot.pickle", "--out", "earlier/snapshot.json"],
        "earlier/snapshot.json",
    ),
    "sweep --napkin": (
        ["sweep", "{made}/mine.yaml", "seq_len=16,32", "--napkin", "--out", "new"],
        "report.html",
    ),
}


@pytest.mark.parametrize("command", CASES)
def test_a_full_disk(command: str, disk, made: Path, capfd, tried: Tried) -> None:
    what, folder, full = disk
    (folder / "earlier").mkdir()
    for name in ("page.html", "snapshot.json", "profile.json"):
        (folder / "earlier" / name).write_text("an earlier result")
    before = {**contents(folder), **{f"made/{name}": data for name, data in contents(made).items()}}
    arguments, path = CASES[command]
    capfd.readouterr()
    with full():
        status = call(folder, *[argument.format(made=made) for argument in arguments])
    err = capfd.readouterr().err.splitlines()[-1]
    assert status == 2, err
    assert WHY[what] in err
    assert path in err
    assert "room" in err.lower()
    after = contents(folder)
    assert not [name for name in after if name.endswith(".partial")]
    kept = {**after, **{f"made/{name}": data for name, data in contents(made).items()}}
    assert {name: kept[name] for name in before} == before
    left = check_new(folder / "new")
    tried(
        "Disk full",
        f"`harness {command}`: {what}",
        f"exit 2: {err.removeprefix('harness: ').split('. ')[0].replace(str(made), '').replace('|', '')}; "
        f"earlier results intact{left}",
    )


def check_new(new: Path) -> str:
    """What could be written is whole, and says that it is not all."""
    if (new / "cells").is_dir():
        cells = list((new / "cells").glob("*.json"))
        for cell in cells:
            Outcome.from_json(json.loads(cell.read_bytes())["outcome"], str(cell))
        return f"; the {len(cells)} cells that were done are kept"
    if not new.is_dir():
        return ""
    for checkpoint in checkpoints(new / "checkpoints"):
        verify(checkpoint)
    assert all(json.loads(line) for line in (new / "log.jsonl").read_text().splitlines())
    assert any("cannot write" in warning for warning in StepProfile.read(new / "profile.json").warnings)
    return "; the profile so far is written, with the reason among its warnings"


def test_a_log_that_cannot_grow_has_no_half_line(made: Path, tmp_path: Path, capfd, tried: Tried) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # recipe.yaml fits; the log does not
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        status = call(tmp_path, "run", str(made / "mine.yaml"), "steps=30", "--no-snapshot", "--out", "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capfd.readouterr().err.splitlines()[-1]
    assert status == 2
    assert "new/" in err
    text = (tmp_path / "new" / "log.jsonl").read_text()
    assert text.endswith("\n")
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 30
    tried(
        "Disk full",
        "`harness run`: no room for one more line of log.jsonl",
        "exit 2; every line there is whole",
    )
