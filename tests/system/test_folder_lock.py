"""Two runs into one folder: the second is told who is at work there, and nothing of the first is touched."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.file import load_recipe
from harness.run_folder.run_folder import RunFolder
from harness.system import folder_lock
from harness.system.folder_lock import NAME, FolderLock, is_held, refuse_held
from tests.support.places import open_below
from tests.support.trust_report import Tried

HOLDER = """
import sys, time
from pathlib import Path
from harness.system import FolderLock
lock = FolderLock(Path(sys.argv[1]), "--out it")
print("held", flush=True)
time.sleep(600)
"""


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "--out a"):
        for take in (FolderLock, refuse_held):
            with pytest.raises(InputError) as caught:
                take(tmp_path, "--out a")
            who = f"process {os.getpid()} on {socket.gethostname()}, since 20"
            assert str(caught.value).startswith(f"--out a: {who}")
    refuse_held(tmp_path, "--out a")
    FolderLock(tmp_path, "--out a").release()
    assert os.listdir(tmp_path) == []


def test_whether_it_is_held_is_known_and_no_file_stays_open(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with FolderLock(tmp_path, "--out a"):
        assert is_held(tmp_path)
        with pytest.raises(InputError):
            FolderLock(tmp_path, "--out a")
    assert not is_held(tmp_path)
    assert open_below(tmp_path) == []


def test_many_who_take_it_in_turns_are_never_two(tmp_path: Path) -> None:
    """The file is removed each time: who has opened it by then must not think that he has the lock."""
    inside, most, failures = [0], [0], list[BaseException]()

    def take() -> None:
        for _ in range(50):
            try:
                with FolderLock(tmp_path, "--out a"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
            except InputError:  # it was held for a while
                pass
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], failures, os.listdir(tmp_path)) == (1, [], [])


def test_a_file_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, removed = folder_lock._lock, []

    def lock(file: int) -> bool:
        if not removed:  # by the one before, between the opening and the locking
            removed.append(os.unlink(tmp_path / NAME))
        return locked(file)

    monkeypatch.setattr(folder_lock, "_lock", lock)
    with FolderLock(tmp_path, "--out a"):
        assert os.path.exists(tmp_path / NAME)
        assert is_held(tmp_path)


def test_asking_makes_nothing(tmp_path: Path) -> None:
    refuse_held(tmp_path, "--out a")
    refuse_held(tmp_path / "missing", "--out a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_process_that_dies_frees_it(number: signal.Signals, tmp_path: Path, tried: Tried) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on"):
            FolderLock(tmp_path, "--out a")
        holder.send_signal(number)
    FolderLock(tmp_path, "--out a").release()
    fault = f"a run that holds its folder ends by {number.name}"
    tried("Two runs into one folder", fault, "the kernel frees the lock: the next run begins")


def test_two_runs_into_one_folder(tmp_path: Path, tried: Tried) -> None:
    recipe = load_recipe("smoke")[1]
    profile = predict(recipe, find_hardware("h100"))
    folder = tmp_path / "run"
    first, second = (RunFolder(folder, "smoke", recipe) for _ in range(2))  # there is no folder yet
    assert not folder.exists()
    first.log({"step": 0})
    for write in (lambda: second.log({"step": 0}), lambda: second.write_profile(profile)):
        with pytest.raises(InputError, match=f"process {os.getpid()} on .*, writes there"):
            write()
    with pytest.raises(InputError, match="writes there"):
        RunFolder(folder, "smoke", recipe)
    with pytest.raises(InputError, match="writes there"):
        RunFolder(folder, "smoke", recipe, resume=None)
    first.log({"step": 1})
    first.write_profile(profile)
    with pytest.raises(InputError, match=r"already holds a profile\.json"):
        second.write_profile(profile)  # the first has ended, and left its files
    assert (folder / "log.jsonl").read_text() == '{"step":0}\n{"step":1}\n'
    fault = "two runs started at once into one new folder"
    tried(
        "Two runs into one folder", fault, "exit 2 for the second, who is at work there named; nothing mixed"
    )


def test_two_processes_of_which_one_resumes(tmp_path: Path) -> None:
    recipe = load_recipe("smoke")[1]
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    running = FolderLock(tmp_path, "--out it")
    with pytest.raises(InputError, match="writes there"):
        RunFolder(None, "smoke", recipe, resume=tmp_path)
    running.release()
    RunFolder(None, "smoke", recipe, resume=tmp_path)


def test_what_is_no_lock_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("keep")
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink(tmp_path / "target", path)):
        make(tmp_path / NAME)
        with pytest.raises(InputError, match=r"--out a: cannot lock the folder with .*\.lock: "):
            FolderLock(tmp_path, "--out a")
        refuse_held(tmp_path, "--out a")
        (tmp_path / NAME).rmdir() if (tmp_path / NAME).is_dir() else (tmp_path / NAME).unlink()
    assert (tmp_path / "target").read_text() == "keep"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "\\u001b[31m"}', "[" * 1000, "\0" * 5000])
def test_a_lock_that_somebody_wrote_into_is_no_matter(content: str, tmp_path: Path) -> None:
    with FolderLock(tmp_path, "--out a"):
        (tmp_path / NAME).write_text(content)
        with pytest.raises(InputError, match="writes there") as caught:
            FolderLock(tmp_path, "--out a")
        assert "\x1b" not in str(caught.value)


def test_a_full_disk_is_said_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs makes an empty file where nothing can be written any more."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_lock.os, "pwrite", full)
    with pytest.raises(InputError, match=r"^--out here: cannot lock the folder with .*: No space left on"):
        FolderLock(tmp_path, "--out here")
    assert not list(tmp_path.iterdir())
