"""Two runs of several ranks that begin at once in one folder: the one that is there first has it."""

from pathlib import Path
from typing import Any

import pytest

from harness.cli.running.ranks import RunOptions, run_here
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.launch.agent import Ending
from harness.napkin.prediction import predict
from harness.run_folder import RankFolder
from tests.support.tiny import tiny

RECIPE = tiny(parallel="ddp", dp_replicate=2)
OTHERS = predict(RECIPE, find_hardware("h100")).to_json()
WHY = "rank 0: --out: another process writes there."


def asked(folder: Path) -> RunOptions:
    return RunOptions(folder, None, snapshot=False, device="cpu", patience_s=60.0, trackers=[], after=None)


@pytest.mark.parametrize("ended", [False, True], ids=["it runs", "it has ended"])
def test_the_other_runs_folder_is_left_as_it_is(
    ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took the folder while the ranks of this run were starting."""
    folder = tmp_path / "run"
    there = [folder / "ranks" / "0" / "profile.json", *([folder / "profile.json"] if ended else [])]
    other: list[RankFolder] = []

    def start(*_: Any) -> Ending:
        other.append(RankFolder(folder, "other", RECIPE, None, 0))
        other[0].hold()
        for path in there:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(OTHERS)
        if ended:
            del other[:]
        return Ending(InputError.exit_status, 0, WHY)

    monkeypatch.setattr("harness.launch.start_ranks", start)
    assert run_here("tiny", RECIPE, asked(folder)) == (None, folder, InputError.exit_status)
    assert {path: path.read_text() for path in folder.rglob("profile.json")} == dict.fromkeys(there, OTHERS)
    assert WHY in capsys.readouterr().err


def test_rank_0_holds_the_folder_before_anything_is_in_it(tmp_path: Path) -> None:
    first, second = (RankFolder(tmp_path, "tiny", RECIPE, None, 0) for _ in range(2))
    first.hold()
    with pytest.raises(InputError, match="writes there"):
        second.hold()


def test_a_rank_that_is_killed_before_it_writes_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def start(*_: Any) -> Ending:
        folder.mkdir()
        (folder / ".lock").write_text("a process that is gone")
        return Ending(InputError.exit_status, 1, "rank 1: there is no GPU here.")

    monkeypatch.setattr("harness.launch.start_ranks", start)
    assert run_here("tiny", RECIPE, asked(folder)) == (None, folder, InputError.exit_status)
    assert not folder.exists()


def test_more_ranks_than_processors_can_start_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.launch.start_ranks", lambda *_: Ending(1, 0, WHY))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for ranks, warned in ((16, False), (64, True)):
        run_here("tiny", tiny(parallel="ddp", dp_replicate=ranks), asked(tmp_path / "run"))
        assert (f"--world-size {ranks} --rank 0" in capsys.readouterr().err) is warned
