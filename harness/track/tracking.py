"""The run's side of tracking: it starts a process per tracker, passes on its sentences, and waits for it."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.track.jobs import Job, recipe_config
from harness.track.trackers import KEEPS_FILES
from harness.virtual_gpu import outside

Say = Callable[[str], None]
"""Is called with the trackers' sentences: where a run can be seen, what failed."""
PATIENCE_S = 120.0
"""How many seconds a tracker has to send the rest when the run is over. One that needs longer is ended."""
ANNOUNCED_AFTER_S = 5.0
"""After so many of these seconds the user is told that the run waits."""
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank's environment, which a tracker's process does not get."""


@contextmanager
def followed(
    trackers: Sequence[str],
    folder: Path,
    name: str,
    recipe: Mapping[str, Any],
    say: Say,
    *,
    resumed: bool = False,
) -> "Generator[Sequence[_TrackerProcess]]":
    """While the block runs, `trackers` (from tracker_names) follow the run's folder, which need not exist
    yet. `recipe`: its fields. `resumed`: the folder has a log already, which is written anew. No failure of a
    tracker raises here. At the end of the block it waits for the trackers.
    """
    log, config = folder / "log.jsonl", recipe_config(recipe)
    passed_over = log.stat().st_ino if resumed and log.exists() else None
    about = str(folder.absolute()), name, config
    processes = [
        _TrackerProcess([Job(tracker, *about, passed_over=passed_over)], say) for tracker in trackers
    ]
    try:
        yield processes
    finally:
        _wait(processes)


def track_run(
    trackers: Sequence[str], folder: RunFolder, recipe: Recipe, say: Say
) -> AbstractContextManager[Any]:
    """`followed` for a run that is about to write `folder`."""
    fields, resumed = recipe.model_dump(mode="json"), folder.checkpoint is not None
    return followed(trackers, folder.path, folder.recipe_name, fields, say, resumed=resumed)


def track_all(trackers: Iterable[str], jobs: Sequence[Job], say: Say) -> None:
    """Report runs that are over to each tracker, one after the other; the jobs' `tracker` is set here.

    A job without numbers is for the trackers that keep files only.
    """
    processes: list[_TrackerProcess] = []
    for tracker in trackers:
        own_jobs = [replace(job, tracker=tracker) for job in jobs if job.values or tracker in KEEPS_FILES]
        if own_jobs:
            processes.append(_TrackerProcess(own_jobs, say))
    _wait(processes)


class _TrackerProcess:
    """The process of one tracker (track/following.py).

    It sees no GPU, is no rank, and has no terminal: Ctrl-C reaches the run alone. The end of its stdin, which
    a killed run closes too, tells it to send the rest and end.
    """

    def __init__(self, jobs: Sequence[Job], say: Say) -> None:
        self.tracker, self._say = jobs[0].tracker, say
        environment = {name: value for name, value in outside(os.environ).items() if name not in DISTRIBUTED}
        self._chatter: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.track.following"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._chatter,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with suppress(OSError):  # it is dead already: `wait` says so
            self._process.stdin.write(json.dumps([asdict(job) for job in jobs]).encode() + b"\n")
            self._process.stdin.flush()

    def over(self) -> None:
        """Say that the run is over."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds. Returns whether the process has ended."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join()
        if status:
            self._chatter.seek(0)
            last = self._chatter.read().decode(errors="replace").strip().splitlines() or [f"status {status}"]
            self._say(f"{self.tracker}: its process ended early: {last[-1]}. log.jsonl has every step.")
        self._chatter.close()
        return True

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._chatter.close()

    def say(self, what: str) -> None:
        self._say(f"{self.tracker}: {what}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._say(line.decode(errors="replace").rstrip("\n"))


def _wait(processes: Sequence[_TrackerProcess]) -> None:
    """Let each process send the rest, for PATIENCE_S at most."""
    for process in processes:
        process.over()
    for process in processes:
        try:
            if process.wait(ANNOUNCED_AFTER_S):
                continue
            process.say(f"it is sending the rest, for {PATIENCE_S:.0f} seconds at most")
            if process.wait(PATIENCE_S - ANNOUNCED_AFTER_S):
                continue
            process.say(
                f"it had not sent everything after {PATIENCE_S:.0f} seconds. log.jsonl has every step."
            )
        except KeyboardInterrupt:
            process.say("it was not waited for. log.jsonl has every step.")
        process.end()
