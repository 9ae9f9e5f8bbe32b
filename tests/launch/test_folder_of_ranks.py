"""Two runs of several ranks that begin at once in one folder: the one that is there first has it. And which
of several ranks that ended badly is the cause, by the agent's own records of them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from harness.cli.running.ranks import RunOptions, run_here
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.launch import agent
from harness.launch.agent import Ending
from harness.napkin.prediction import predict
from harness.run_folder import RankFolder
from tests.support.tiny import tiny

RECIPE = tiny(parallel="ddp", dp_replicate=2)
OTHERS = predict(RECIPE, find_hardware("h100")).to_json()
WHY = "rank 0: --out: another process writes there."


def asked(folder: Path) -> RunOptions:
    return RunOptions(folder, None, snapshot=False, device="cpu", patience_s=60.0, after=None)


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


GONE = "another rank is gone, in optimizer_step after 6 steps."
LATE = "another rank did not come to a sum in time, in backward after 1 steps."
GLOO = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
OF_ITS_OWN = "out of memory in forward"


class _Sees:
    """A watcher of ranks none of which hung."""

    hanging = None


def failure(folder: Path, rank: int, exitcode: int, message: str | None, at_s: int) -> ProcessFailure:
    told = folder / f"{rank}.json"
    if message is not None:
        reason = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(at_s)}}
        told.write_text(json.dumps({"message": reason}))
    found = ProcessFailure(local_rank=rank, pid=rank + 1, exitcode=exitcode, error_file=str(told))
    found.timestamp = at_s
    return found


@pytest.mark.parametrize(
    ("ended", "status", "rank", "reason"),
    [
        ([(2, GONE, 5), (-9, None, 5)], 137, 1, "rank 1 was killed by SIGKILL"),
        ([(2, LATE, 5), (-9, None, 5)], 137, 1, "rank 1 was killed by SIGKILL"),
        ([(1, GLOO, 5), (-11, None, 6)], 139, 1, "rank 1 was killed by SIGSEGV"),
        ([(-15, None, 5), (3, OF_ITS_OWN, 5)], 3, 1, "rank 1: out of memory in forward"),
        ([(143, None, 5), (2, GONE, 5), (3, OF_ITS_OWN, 6)], 3, 2, "rank 2: out of memory in forward"),
        ([(3, OF_ITS_OWN, 5), (-9, None, 15)], 3, 0, "rank 0: out of memory in forward"),
        ([(2, GONE, 5), (-15, None, 6)], 2, 0, f"rank 0: {GONE}"),
    ],
)
def test_the_cause_is_the_rank_that_did_not_end_for_another(
    ended: list[tuple[int, str | None, int]], status: int, rank: int, reason: str, tmp_path: Path
) -> None:
    failures = {number: failure(tmp_path, number, *how) for number, how in enumerate(ended)}
    for order in itertools.permutations(failures.items()):
        found = agent._ending(ChildFailedError("run", dict(order)), _Sees())  # type: ignore[arg-type]
        assert (found.status, found.rank, found.reason) == (status, rank, reason)
