"""The process beside a run: `python -m harness.track.following` with jobs as lines of JSON on stdin.

A blank line ends the jobs, and the end of stdin says that the run is over. What it prints are sentences for
people.
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
"""In a run folder."""
GIVEN_UP_AFTER = 3
"""Steps, one after the other, that a tracker did not take."""
LONGEST_REASON = 400
"""Characters of what a library says."""


class Log:
    """The lines of a log.jsonl as they are added, each once, those of a resumed run's repeated steps too."""

    def __init__(self, path: Path, passed_over: int | None) -> None:
        self.path = path
        self._passed_over = passed_over
        self._file: tuple[int, int] = (0, 0)
        """Inode, and how many bytes are read."""
        self._last_step = -1

    def more(self) -> Iterator[dict[str, Any]]:
        """What was added since the last call; a line that is still being written is left for the next."""
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
    """Tells one tracker about one run."""

    def __init__(self, job: Job, say: Say) -> None:
        self.job, self._say = job, say
        self.tracker: OpenTracker | None = None
        self.failed, self.missed, self.reason = 0, 0, ""

    def say(self, what: str) -> None:
        """A sentence about this tracker, for people."""
        self._say(f"{self.job.tracker}: {what}")

    def open(self) -> bool:
        """Whether the tracker takes the run; if not, it has been said why."""
        try:
            self.tracker = OpenTracker(self.job)
        except (Exception, SystemExit) as error:
            self.say(f"{in_words(error)} log.jsonl has every step.")
            return False
        if self.job.values is None:
            self.say(self.tracker.where)
        return True

    def tell(self, values: dict[str, float], step: int, *, afterwards: bool = False) -> bool:
        """Whether to go on; a step that is not taken is counted. `afterwards`: others have followed it."""
        assert self.tracker is not None
        log = self.tracker.log_afterwards if afterwards else self.tracker.log
        try:
            if values:
                log(values, step)
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
    """Tell the tracker each step as it is logged, until the run is over; then what its profile says.

    Of a watched command on several ranks it is rank 0's log that is followed.
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
    """A run that is over: its numbers, and its files. Whether the tracker took it."""
    follower = Follower(job, say)
    if not follower.open():
        return False
    taken = follower.tell(job.values or {}, 0)
    follower.close([Path(file) for file in job.attach])
    return taken


def in_words(error: BaseException) -> str:
    """The first line of what a library says, as a sentence."""
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
    """Profile, snapshot, and the report, which is made for it."""
    files = [folder / name for name in ("profile.json", "snapshot.pickle") if (folder / name).exists()]
    try:
        from harness.report import read_run, write_report

        write_report([read_run(folder)], made / "report.html")
        files.append(made / "report.html")
    except InputError:  # no jinja2, or nothing to draw
        pass
    return files


def main() -> None:
    """One job is a run that goes on; several are runs that are over."""
    with os.fdopen(os.dup(0), "rb") as lines:
        jobs = [Job.from_json(line) for line in iter(lines.readline, b"\n") if line.strip()]
    if hasattr(os, "nice"):
        os.nice(10)  # a processor that both want is the run's, whose times are measured
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for people

    def say(words: str) -> None:
        print(words, file=said, flush=True)

    over = threading.Event()
    threading.Thread(target=_until_the_end, args=(over,), daemon=True).start()
    known_trackers()  # while the run is set up: it imports accelerate
    for job in jobs:
        if job.values is None:
            follow(job, over, say)
        elif not tell_at_once(job, say):
            return


def _until_the_end(over: threading.Event) -> None:
    os.read(0, 1)
    over.set()


if __name__ == "__main__":
    main()
