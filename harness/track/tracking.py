"""The process of the run's side: it starts a process a tracker, hears its sentences, and waits at the end."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.track.jobs import Job, run_job
from harness.track.trackers import KEEPS_FILES
from harness.virtual_gpu import outside

Told = Callable[[str], None]
"""Who hears what the trackers say: where a run can be seen, what failed."""
PATIENCE_S = 120.0
"""For what is left to send when the run is over. A tracker that needs longer is ended."""
ANNOUNCED_AFTER_S = 5.0
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def followed(
    trackers: Sequence[str],
    folder: Path,
    name: str,
    recipe: Mapping[str, Any],
    told: Told,
    *,
    resumed: bool = False,
) -> "Generator[Sequence[_Beside]]":
    """Inside, a run goes on, and `trackers` (of tracker_names) follow its folder, which need not be there
    yet. `recipe`: its fields. `resumed`: the folder has a log already, which is written anew. Nothing that a
    tracker does raises here.
    """
    jobs = [run_job(tracker, folder, name, recipe, resumed=resumed) for tracker in trackers]
    beside = [_Beside([job], told) for job in jobs]
    try:
        yield beside
    finally:
        _wait(beside)


def track_run(
    trackers: Sequence[str], folder: RunFolder, recipe: Recipe, told: Told
) -> AbstractContextManager[Any]:
    """`followed`, of a run that is about to write `folder`."""
    fields, resumed = recipe.model_dump(mode="json"), folder.checkpoint is not None
    return followed(trackers, folder.path, folder.recipe_name, fields, told, resumed=resumed)


def track_all(trackers: Iterable[str], jobs: Sequence[Job], told: Told) -> None:
    """Tell each tracker about runs that are over, one after the other; `tracker` of the jobs is set here.

    A job that has nothing but files is for the trackers that keep files.
    """
    beside: list[_Beside] = []
    for tracker in trackers:
        of_it = [replace(job, tracker=tracker) for job in jobs if job.values or tracker in KEEPS_FILES]
        if of_it:
            beside.append(_Beside(of_it, told))
    _wait(beside)


class _Beside:
    """The process of one tracker (track/following.py).

    It has no device and no other process of a training to wait for, and no terminal: Ctrl-C reaches the run,
    and the end of its stdin, which a killed run closes too, tells it to send the rest and end.
    """

    def __init__(self, jobs: Sequence[Job], told: Told) -> None:
        self.tracker, self._told = jobs[0].tracker, told
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
            self._process.stdin.writelines(job.to_json().encode() + b"\n" for job in jobs)
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def over(self) -> None:
        """There is nothing more to come."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join()
        if status:
            self._chatter.seek(0)
            last = self._chatter.read().decode(errors="replace").strip().splitlines() or [f"status {status}"]
            self._told(f"{self.tracker}: its process ended early: {last[-1]}. log.jsonl has every step.")
        self._chatter.close()
        return True

    def end(self) -> None:
        """Do not wait for it any longer."""
        self._process.kill()
        self._process.wait()
        self._chatter.close()

    def say(self, what: str) -> None:
        self._told(f"{self.tracker}: {what}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told(line.decode(errors="replace").rstrip("\n"))


def _wait(beside: Sequence[_Beside]) -> None:
    """Let each send the rest, in PATIENCE_S at most."""
    for one in beside:
        one.over()
    for one in beside:
        try:
            if one.wait(ANNOUNCED_AFTER_S):
                continue
            one.say(f"it is sending the rest, for {PATIENCE_S:.0f} seconds at most")
            if one.wait(PATIENCE_S - ANNOUNCED_AFTER_S):
                continue
            one.say(f"it had not sent everything after {PATIENCE_S:.0f} seconds. log.jsonl has every step.")
        except KeyboardInterrupt:
            one.say("it was not waited for. log.jsonl has every step.")
        one.end()
