"""What `harness serve` shows: the runs, profiles, snapshots and sweeps in a folder. Imports no torch.

Symbolic links are not followed, wherever they point: nothing outside the folder is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.errors import InputError
from harness.step_profile import StepProfile
from harness.sweep import Sweep

MOST_ENTRIES = 2000
RUN_FILES = ("profile.json", "snapshot.pickle", "snapshot.json")
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Entry:
    """Something that a page can be made of."""

    name: str
    """Its path in the folder, with slashes: what the pages' addresses hold."""
    kind: Literal["run", "profile", "snapshot", "sweep"]
    path: Path
    signature: tuple[tuple[str, int, int], ...]
    """Name, size and time of change of every file it is made of."""
    answer: str = "-"
    model: str = "-"
    device: str = "-"
    peak_bytes: int | None = None
    """Allocated."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    problem: str | None = None
    """Why there can be no page of it."""

    @property
    def changed(self) -> str:
        """Local time of the last change."""
        newest_ns = max(changed_ns for _, _, changed_ns in self.signature)
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(newest_ns / 1e9))


class Index:
    """The entries of a folder, read again when their files change."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if there is no such folder."""
        if not os.path.isdir(folder):
            raise InputError(
                f"there is no folder {folder}. Give a folder that holds runs, or make some first."
            )
        self.folder = folder.resolve()
        self._known: dict[str, Entry] = {}

    def entries(self) -> list[Entry]:
        """Every entry, by name; at most MOST_ENTRIES."""
        found = {}
        for name, kind, path, signature in self._files():
            known = self._known.get(name)
            if known is None or known.signature != signature:
                known = _described(name, kind, path, signature)
            if known is not None:
                found[name] = known
            if len(found) == MOST_ENTRIES:
                break
        self._known = found
        return [found[name] for name in sorted(found)]

    def entry(self, name: str) -> Entry | None:
        """The entry of this name, if the folder has one now. The name is looked up, never opened."""
        return next((entry for entry in self.entries() if entry.name == name), None)

    def _files(self) -> Iterator[tuple[str, str, Path, tuple[tuple[str, int, int], ...]]]:
        for text, folders, files in os.walk(self.folder, followlinks=False):
            here = Path(text)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            linked = {name for name in files if (here / name).is_symlink()}
            regular = [name for name in sorted(files) if name not in linked and not name.startswith(".")]
            if SWEEP_FILE in regular:
                folders[:] = [name for name in folders if name != "cells"]
                yield self._found("sweep", here, [SWEEP_FILE])
            run = [name for name in RUN_FILES if name in regular]
            if run and here != self.folder and not linked & set(RUN_FILES):
                yield self._found("run", here, run)
                continue
            for name in regular:
                if name.endswith(".json") and name != SWEEP_FILE:
                    yield self._found("profile", here / name, [""])
                elif name.endswith(".pickle"):
                    yield self._found("snapshot", here / name, [""])

    def _found(
        self, kind: str, path: Path, files: list[str]
    ) -> tuple[str, str, Path, tuple[tuple[str, int, int], ...]]:
        stats = [(name, os.lstat(path / name if name else path)) for name in files]
        signature = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        return path.relative_to(self.folder).as_posix(), kind, path, signature


def _described(name: str, kind: str, path: Path, signature: tuple[tuple[str, int, int], ...]) -> Entry | None:
    """The entry with what its profile says; None for a JSON file that is no profile."""
    match kind:
        case "sweep":
            return _of_sweep(name, path, signature)
        case "snapshot":
            return Entry(name, "snapshot", path, signature)
        case "run" if signature[0][0] != "profile.json":
            return Entry(name, "run", path, signature)
    try:
        profile = StepProfile.read(path / "profile.json" if kind == "run" else path)
    except InputError as error:
        return Entry(name, "run", path, signature, problem=str(error)) if kind == "run" else None
    memory, step = profile.memory, profile.step
    return Entry(
        name,
        "run" if kind == "run" else "profile",
        path,
        signature,
        answer=profile.source if profile.oom is None else f"{profile.source}, out of memory",
        model=str(profile.recipe.get("model", "-")),
        device=profile.hardware.name,
        peak_bytes=memory.peak_allocated_bytes,
        step_s=step.time_s.median,
        tokens_per_s=step.tokens_per_s,
    )


def _of_sweep(name: str, path: Path, signature: tuple[tuple[str, int, int], ...]) -> Entry:
    try:
        sweep = Sweep.read(path / SWEEP_FILE)
    except InputError as error:
        return Entry(name, "sweep", path, signature, problem=str(error))
    fields = ", ".join(sweep.axes)
    return Entry(
        name,
        "sweep",
        path,
        signature,
        answer=f"{sweep.kind}, {len(sweep.cells)} cells of {fields}",
        model=str(sweep.base.get("model", "-")),
        device=sweep.hardware or "-",
    )
