"""The process beside a run: `python -m harness.track.following` with its jobs as a line of JSON on stdin.

The end of stdin says that the run is over. On stdout it prints sentences for the user.
"""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.run_folder import folder_of_rank, read_profile
from harness.track.jobs import Job, profile_values, step_values, values_by_step
from harness.track.trackers import KEEPS_FILES, OpenTracker, known_trackers

Say = Callable[[str], None]
POLL_S = 0.5
FIRST_RANK = folder_of_rank(Path(), 0)
"""Rank 0's folder, relative to a run folder."""
GIVEN_UP_AFTER = 3
"""After so many consecutive steps that it did not take, a tracker is given up."""
LONGEST_REASON = 400
"""How many characters of a library's error are shown."""


class Log:
    """Reads a log.jsonl's lines as they are added, each step's once, even if a resumed run writes it anew."""

    def __init__(self, path: Path, passed_over: int | None) -> None:
        """`passed_over`: the inode of a log of before the run, which is ignored (`Job.passed_over`)."""
        self.path = path
        self._passed_over = passed_over
        self._file: tuple[int, int] = (0, 0)
        """The file's inode, and how many of its bytes were read."""
        self._last_step = -1

    def more(self) -> Iterator[dict[str, Any]]:
        """The steps added since the last call; a line that is still being written is left for the next."""
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode == self._passed_over:
                    return
                begin = self._file[1] if self._file[0] == inode else 0
                file.seek(begin)
                lines = [line for line in file if line.endswith(b"\n")]
        except FileNotFoundError:
            return
        self._file = inode, begin + sum(map(len, lines))
        for text in lines:
            line = json.loads(text)
            if line["step"] > self._last_step:
                self._last_step = line["step"]
                yield line


class Follower:
    """Reports one run to one tracker."""

    def __init__(self, job: Job, say: Say) -> None:
        self.job, self._say = job, say
        self.tracker: OpenTracker | None = None
        self.failed, self.missed, self.reason = 0, 0, ""
        """Steps that the tracker did not take: how many just now in a row, how many in all, and why."""

    def say(self, what: str) -> None:
        """Say a sentence about this tracker to the user."""
        self._say(f"{self.job.tracker}: {what}")

    def open(self) -> bool:
        """Open the tracker. Returns whether it takes the run; if not, the reason has been said."""
        try:
            self.tracker = OpenTracker(self.job)
        except (Exception, SystemExit) as error:
            self.say(f"{in_words(error)} log.jsonl has every step.")
            return False
        if self.job.values is None:
            self.say(self.tracker.where)
        return True

    def tell(self, values: dict[str, float], step: int, *, afterwards: bool = False) -> bool:
        """Report a step's numbers; one that the tracker does not take is counted. Returns whether to go on.
        `afterwards`: later steps have been reported already."""
        assert self.tracker is not None
        try:
            if values:
                self.tracker.log(values, step, afterwards=afterwards)
        except Exception as error:
            self.failed, self.missed, self.reason = self.failed + 1, self.missed + 1, in_words(error)
        else:
            self.failed = 0
        return self.failed < GIVEN_UP_AFTER

    def close(self, files: list[Path]) -> None:
        """Hand over the files, send the rest, and say what was missed."""
        assert self.tracker is not None
        try:
            self.tracker.attach(files)
        except Exception as error:
            self.say(f"the files could not be kept: {in_words(error)}")
        try:
            self.tracker.close()
        except (Exception, SystemExit) as error:
            self.say(f"it did not close: {in_words(error)}")
        if self.missed:
            self.say(f"it did not take {self.missed} steps: {self.reason} log.jsonl has every step.")


def follow(job: Job, over: threading.Event, say: Say) -> None:
    """Report each step to the tracker as it is logged, until the run is over; then its profile.

    For a watched command on several ranks, rank 0's log is followed.
    """
    folder, follower = Path(job.folder), Follower(job, say)
    log, step = Log(folder / "log.jsonl", job.passed_over), 0
    going_on = True
    while going_on:
        ended = over.wait(POLL_S)  # before reading: what was written until then is read
        if log.path.parent == folder and (folder / FIRST_RANK / "log.jsonl").exists():
            log = Log(folder / FIRST_RANK / "log.jsonl", None)
        for line in log.more():
            if follower.tracker is None and not follower.open():
                return
            step = line["step"]
            going_on = follower.tell(step_values(line), step)
            if not going_on:
                break
        going_on = going_on and not ended
    over.wait()
    profile = _profile(folder)
    if follower.tracker is None and (profile is None or not follower.open()):
        return
    if profile is not None:
        follower.tell(profile_values(profile), step)
        for recorded, values in values_by_step(profile).items():
            follower.tell(values, recorded, afterwards=True)
    with tempfile.TemporaryDirectory() as made:
        follower.close(_kept_files(folder, Path(made)) if job.tracker in KEEPS_FILES else [])


def tell_at_once(job: Job, say: Say) -> bool:
    """Report the numbers and the files of a run that is over. Returns whether the tracker took the run."""
    follower = Follower(job, say)
    if not follower.open():
        return False
    taken = follower.tell(job.values or {}, 0)
    follower.close([Path(file) for file in job.attach])
    return taken


def in_words(error: BaseException) -> str:
    """The first line of a library's error, as a sentence."""
    while isinstance(error.__context__, ModuleNotFoundError):  # the package that is looked for first
        error = error.__context__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the package {error.name}, which is not installed. Run: pip install {error.name}."
    if isinstance(error, InputError):
        return str(error)
    text = (str(error).strip().splitlines() or [""])[0][:LONGEST_REASON].rstrip(".")
    return f"{type(error).__name__}: {text}."


def _profile(folder: Path) -> Any:
    try:
        return read_profile(folder)
    except InputError:  # killed before it was written
        return None


def _kept_files(folder: Path, made: Path) -> list[Path]:
    """The files that a tracker keeps: profile and snapshot, and a report, which is written into `made`."""
    files = [folder / name for name in ("profile.json", "snapshot.pickle") if (folder / name).exists()]
    try:
        from harness.report import read_run, write_report

        write_report([read_run(folder)], made / "report.html")
        files.append(made / "report.html")
    except InputError:  # no jinja2, or nothing to draw
        pass
    return files


def main() -> None:
    """Read and report the jobs: a run at work is followed, runs that are over are reported at once."""
    with os.fdopen(os.dup(0), "rb") as lines:
        jobs = [Job(**job) for job in json.loads(lines.readline() or "[]")]
    if hasattr(os, "nice"):
        os.nice(10)  # the run, whose times are measured, comes first where processors are few
    sentences = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the user

    def say(words: str) -> None:
        print(words, file=sentences, flush=True)

    over = threading.Event()

    def wait_for_the_end() -> None:
        os.read(0, 1)
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    known_trackers()  # while the run is set up: it imports accelerate
    for job in jobs:
        if job.values is None:
            follow(job, over, say)
        elif not tell_at_once(job, say):
            return


if __name__ == "__main__":
    main()
