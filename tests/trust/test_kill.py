"""Commands killed at random moments: what was finished is whole, nothing half-written passes for a result.

The seeded moments here are few; `make trust` tries 50 a command (KILLS=50).
"""

import json
import os
import random
import shutil
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.recipe.file import load_recipe
from harness.run_folder.checkpoint_files import checkpoints, verify
from harness.run_folder.run_folder import FILES
from harness.snapshot.safe_read import read_snapshot
from harness.step_profile.step_profile import StepProfile
from harness.sweep.cell import Outcome
from harness.system.interruption import interrupted_status, interruptible, signals_answered
from tests.support.forked import Ended, Forks
from tests.support.trust_report import Tried

KILLS = int(os.environ.get("KILLS", "3"))
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STATUS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
HALF = ".partial"
"""How the name of a file ends while it is being written (harness/system/files.py)."""


class Killing(NamedTuple):
    """A command that was sent a signal at a random moment."""

    number: int
    ended: Ended
    folder: Path
    """Where it ran: a copy of the folder it was given."""

    @property
    def hard(self) -> bool:
        """Whether it had no chance to put anything in order."""
        return self.number == signal.SIGKILL


def kills(forks: Forks, arguments: Sequence[str], folder: Path, times: int = KILLS) -> Iterator[Killing]:
    """The command, killed at so many random moments of its work."""
    whole = forks.run(arguments, _copy(folder, "whole"))
    assert whole.status == 0, whole.printed
    moments = random.Random(f"{arguments[0]} {times}")
    for n in range(times):
        copy = _copy(folder, f"killed-{n}")
        number = SIGNALS[n % len(SIGNALS)]
        ended = forks.run(arguments, copy, signal=number, after_s=moments.uniform(0, whole.seconds))
        untouched = sorted(path.name for path in copy.iterdir()) == sorted(p.name for p in folder.iterdir())
        # in the first instant a signal still ends the process by itself, SIGINT in Python's own words
        if ended.status != -number or not untouched:
            assert ended.status in (0, STATUS[number]), ended
            assert "Traceback" not in ended.printed, ended
        yield Killing(number, ended, copy)
        shutil.rmtree(copy)


def _copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.parent / name))


class Outcomes:
    """What the kills left, by signal, for docs/trust.md."""

    def __init__(self) -> None:
        self.found: dict[int, Counter[str]] = {number: Counter() for number in SIGNALS}

    def add(self, killing: Killing, left: str) -> None:
        self.found[killing.number][left] += 1

    def report(self, tried: Tried, command: str, rest: str) -> None:
        for number, counts in self.found.items():
            if not counts:
                continue
            left = ", ".join(f"{n} × {what}" for what, n in counts.most_common())
            fault = f"`harness {command}`, {signal.Signals(number).name}"
            times = sum(counts.values())
            tried("Killed at a random moment", fault, f"left {left}; {rest}", times=times)


def halves(folder: Path) -> list[Path]:
    """Files that were being written. Nothing reads them, whatever they hold."""
    return [path for path in folder.rglob("*") if path.name.endswith(HALF)]


def losses(folder: Path) -> list[float]:
    """Of every line of log.jsonl, which must be whole, in order, and none twice."""
    if not (folder / "log.jsonl").exists():
        return []
    text = (folder / "log.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def check_run_folder(folder: Path, killing: Killing) -> str:
    """What is there is whole, and says itself how far it came; in a few words, what there is."""
    if not folder.exists():
        return "nothing"
    names = {path.name for path in folder.iterdir() if not path.name.endswith(HALF)}
    assert names <= {*FILES, "checkpoints", ".lock"}, names
    if "recipe.yaml" in names:
        assert load_recipe(str(folder / "recipe.yaml"))[1].steps == 30
    logged = len(losses(folder))
    if "snapshot.pickle" in names:
        read_snapshot(folder / "snapshot.pickle")
    if "profile.json" not in names:
        assert killing.hard or "recipe.yaml" not in names, "an interrupted run leaves its profile"
        return "a log without a profile"
    profile = StepProfile.read(folder / "profile.json")
    assert len(profile.step.loss or []) - logged in (0, 1)  # the loss is known before its line is written
    if profile.complete:
        assert logged == 34
        return "a whole result"
    assert not killing.hard
    assert killing.ended.status != 0
    return "a profile marked incomplete"


def test_run(forks: Forks, folder: Path, tried: Tried) -> None:
    """Killed, and gone on with `--resume` to the very losses of a run that nobody disturbed."""
    outcomes, resumed = Outcomes(), 0
    arguments = ["run", "mine.yaml", "checkpoint_every=4", "--out", "run"]
    for killing in kills(forks, arguments, folder):
        undisturbed = losses(folder.parent / "whole" / "run")
        assert len(undisturbed) == 34
        run = killing.folder / "run"
        outcomes.add(killing, check_run_folder(run, killing))
        assert killing.hard or not halves(run)
        if killing.ended.status == 0:
            continue
        has_checkpoint = bool(checkpoints(run / "checkpoints"))
        for checkpoint in checkpoints(run / "checkpoints"):
            verify(checkpoint)
        again = arguments[:3] + (["--resume", "run"] if has_checkpoint else ["--out", "again"])
        ended = forks.run(again, killing.folder)
        assert ended.status == 0, ended
        there = run if has_checkpoint else killing.folder / "again"
        assert losses(there) == undisturbed
        assert StepProfile.read(there / "profile.json").complete
        resumed += has_checkpoint
    outcomes.report(tried, "run", "no file by halves under its name; run again or resumed, the same losses")
    assert resumed or KILLS < 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupt_that_python_drops_is_made_again(number: signal.Signals, tried: Tried) -> None:
    class Tensor:
        pass

    tensors = [Tensor()]
    callback = weakref.ref(tensors[0], lambda _: signal.raise_signal(number))

    def command() -> None:
        tensors.clear()
        time.sleep(5)  # without the repetition nothing is raised

    with pytest.raises(KeyboardInterrupt), signals_answered():
        interruptible(command)
    assert callback() is None
    assert interrupted_status() == 128 + number
    fault = "an interrupt that arrives in a callback of a weak reference, where Python drops it"
    tried("Killed at a random moment", fault, "made again; the command ends")


def test_one_that_comes_while_it_is_made_again_is_made_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine at work the timer is over before the thread that waits for its start goes on."""
    slow = [True]

    class Timer(threading.Timer):
        def start(self) -> None:
            super().start()
            if slow:
                slow.clear()
                time.sleep(0.2)

    monkeypatch.setattr(threading, "Timer", Timer)
    tensors = [set[int]()]
    callback = weakref.ref(tensors[0], lambda _: signal.raise_signal(signal.SIGTERM))

    def command() -> None:
        tensors.clear()
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), signals_answered():
        interruptible(command)
    assert callback() is None
    assert not slow


SWEPT = ["mine.yaml", "seq_len=16,32,64,128", "micro_batch_size=1,2,4", "--grid", "--out", "sweep"]


def check_sweep(forks: Forks, killing: Killing, arguments: Sequence[str]) -> str:
    """Every cell that is there is whole; the same command goes on, and no cell is lost or doubled."""
    sweep = killing.folder / "sweep"
    done = {path: path.stat().st_mtime_ns for path in (sweep / "cells").glob("*.json")}
    for path in done:
        Outcome.from_json(json.loads(path.read_bytes())["outcome"], str(path))
    finished = (sweep / "sweep.json").exists()
    assert killing.hard or not halves(sweep)
    again = forks.run(arguments, killing.folder)
    assert again.status == 0, again
    assert {path: path.stat().st_mtime_ns for path in done} == done, "what is done is not done again"
    whole = killing.folder.parent / "whole" / "sweep"
    assert sorted(p.name for p in (sweep / "cells").glob("*.json")) == sorted(
        p.name for p in (whole / "cells").iterdir()
    )
    cells = [json.loads((at / "sweep.json").read_bytes())["cells"] for at in (sweep, whole)]
    resumed, undisturbed = (
        [(c["label"], c["status"], c["peak_allocated_bytes"]) for c in at] for at in cells
    )
    assert resumed == undisturbed
    assert len({label for label, _, _ in resumed}) == len(resumed) == 12
    return "a whole sweep" if finished else "some of the cells" if done else "no cell"


def test_sweep(forks: Forks, folder: Path, tried: Tried) -> None:
    outcomes = Outcomes()
    arguments = ["sweep", *SWEPT, "--napkin"]
    for killing in kills(forks, arguments, folder, times=KILLS if KILLS >= 50 else 1):
        outcomes.add(killing, check_sweep(forks, killing, arguments))
    outcomes.report(tried, "sweep --napkin", "started again it goes on, no cell lost, doubled or done twice")


@pytest.mark.skipif(KILLS < 50, reason="each sweep starts processes that import torch: make trust")
def test_sweep_in_processes(forks: Forks, folder: Path, tried: Tried) -> None:
    outcomes = Outcomes()
    arguments = ["sweep", *SWEPT, "steps=1", "--measure"]
    for killing in kills(forks, arguments, folder, times=KILLS // 10):
        outcomes.add(killing, check_sweep(forks, killing, arguments))
    outcomes.report(tried, "sweep --measure", "started again it goes on, no cell lost, doubled or done twice")


def test_report(forks: Forks, folder: Path, tried: Tried) -> None:
    """The page is the old one or the new one, and the run that it is about stays as it was."""
    made = forks.run(["run", "mine.yaml", "--out", "run"], folder)
    assert made.status == 0, made
    (folder / "page.html").write_text("an earlier report")
    run = {path.name: path.read_bytes() for path in (folder / "run").iterdir()}
    outcomes = Outcomes()
    arguments = ["report", "run", "--out", "page.html"]
    for killing in kills(forks, arguments, folder, times=KILLS if KILLS >= 50 else 1):
        page = (killing.folder / "page.html").read_text()
        assert page == "an earlier report" or page.rstrip().endswith("</html>")
        assert {path.name: path.read_bytes() for path in (killing.folder / "run").iterdir()} == run
        assert killing.hard or not halves(killing.folder)
        outcomes.add(killing, "the earlier page" if page == "an earlier report" else "the whole new page")
        again = forks.run(arguments, killing.folder)
        assert again.status == 0, again
        assert (killing.folder / "page.html").read_text().rstrip().endswith("</html>")
    outcomes.report(tried, "report", "the run stays as it was; the next report works")
