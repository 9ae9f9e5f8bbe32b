"""Reading what a report is about: a run folder, a profile or a snapshot. Imports no torch."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import InputError
from harness.run_folder import RANKS, read_profile
from harness.step_profile import MAX_FILE_BYTES, MAX_VALUES, StepProfile
from harness.system import TooManyValues, parse_json, read_whole

if TYPE_CHECKING:
    from harness.architecture import ModelShape
    from harness.report.history import History


LONGEST_NAME = 200
"""The most characters of a title."""
SNAPSHOTS = ("snapshot.pickle", "snapshot.json")


@dataclass
class ReportRun:
    """One run that a report is about. What it lacks is None, and the report says so."""

    name: str
    profile: StepProfile | None = None
    history: History | None = None
    answers: list[StepProfile] = field(default_factory=list[StepProfile])
    """Other answers about the same recipe, which are compared with the profile."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences about what could not be predicted."""
    shape: ModelShape | None = None
    """The sizes of the recipe's model, where they are known; harness.api adds them."""
    changes: list[str] = field(default_factory=list[str])
    """Changes that would save memory and how much, the most first; harness.api adds them."""

    @property
    def title(self) -> str:
        """The recipe's name or the command where the profile has one; else the run's name."""
        if self.profile is not None and self.profile.recipe is None:
            return self.profile.subject[:LONGEST_NAME]
        name = self.profile.provenance.get("recipe_name") if self.profile is not None else None
        return name if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME else self.name


def read_run(path: Path, device: int | None = None) -> ReportRun:
    """Read a run folder, a profile.json, or a memory snapshot (pickle or JSON).

    `device` is the index of the snapshot's device that is read; by default one that ran out of memory, or
    else the one with the most events. Raises InputError where `path` is none of these, or cannot be read.
    """
    if os.path.isdir(path):
        return _of_folder(path, device)
    if not os.path.lexists(path):
        raise InputError(f"there is no {path}. Give a run folder, a profile.json or a memory snapshot.")
    name = path.absolute().parent.name if path.stem in ("profile", "snapshot") else path.name
    if _is_profile(path):
        return ReportRun(name.removesuffix(".json"), StepProfile.read(path))
    return ReportRun(name, history=_history(path, None, device))


def _of_folder(folder: Path, device: int | None) -> ReportRun:
    of_ranks = (folder / RANKS).is_dir()
    profile = read_profile(folder) if of_ranks or os.path.lexists(folder / "profile.json") else None
    snapshot = next((folder / name for name in SNAPSHOTS if os.path.lexists(folder / name)), None)
    if profile is None and snapshot is None:
        if (folder / "sweep.json").is_file():
            raise InputError(f"{folder} is a sweep's folder. Its report is {folder / 'report.html'}.")
        raise InputError(
            f"{folder} is no run folder: it has neither a profile.json nor a snapshot.pickle. "
            "Give a folder that `harness run` or `harness simulate --out` wrote."
        )
    history = None if snapshot is None else _history(snapshot, profile, device)
    return ReportRun(folder.absolute().name, profile, history)


def _history(path: Path, profile: StepProfile | None, device: int | None) -> History | None:
    """The history in a snapshot. Its events get estimated times where the run's profile has such times."""
    from harness.report.history import estimated_times_us, history_of
    from harness.snapshot import read_snapshot

    history = history_of(read_snapshot(path), profile.memory.at_peak if profile else None, device)
    if history is not None and profile is not None and profile.source != "measured":
        history.time_is_estimated = True
        if not profile.provenance.get("times"):  # the snapshot's times are those of the simulating machine
            known = {name: stats.time_s.median for name, stats in profile.phases.items()}
            history.time_us = estimated_times_us(history, known)
    return history


def _is_profile(path: Path) -> bool:
    """Whether a file is JSON and no snapshot. Raises InputError when it cannot be read."""
    try:
        content = read_whole(path, MAX_FILE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:  # no profile is so large
            return False
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    if not content.lstrip().startswith(b"{"):
        return False
    try:
        document = parse_json(content, MAX_VALUES)
    except TooManyValues:
        return False
    except (ValueError, RecursionError):
        return path.suffix == ".json"  # StepProfile.read says what is wrong with it
    return not (document.keys() & {"segments", "snapshot"})
