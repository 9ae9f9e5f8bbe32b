"""What `harness serve` shows: the runs, profiles, snapshots and sweeps in a folder. Imports no torch.

Symbolic links are not followed, wherever they point: nothing outside the folder is read. What vanishes while
the folder is read is left out.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.errors import InputError
from harness.serve.log import read_log
from harness.step_profile import StepProfile
from harness.sweep import Sweep
from harness.system import is_held

MOST_ENTRIES = 20_000
MOST_FOLDERS = 100_000
"""Looked into: a folder that somebody names may be the whole disk."""
RUN_FILES = ("profile.json", "snapshot.pickle", "snapshot.json")
LOG_FILES = ("log.jsonl", "recipe.yaml")
"""Of a run that has not come to its profile."""
SWEEP_FILE = "sweep.json"
Kind = Literal["run", "running", "stopped", "profile", "snapshot", "sweep"]
Signature = tuple[tuple[str, int, int], ...]
Found = tuple[str, str, Path, Signature]


@dataclass(frozen=True)
class Entry:
    """Something that a page can be made of."""

    name: str
    """Its path in the folder, with slashes: what the pages' addresses hold."""
    kind: Kind
    path: Path
    signature: Signature
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
    def text(self) -> str:
        """What a search looks through."""
        return " ".join((self.name, self.kind, self.answer, self.model, self.device, self.changed)).lower()

    @property
    def changed_ns(self) -> int:
        """The last change, nanoseconds since 1970, as the file system says: a clock may have been wrong."""
        return max(changed_ns for _, _, changed_ns in self.signature)

    @property
    def changed(self) -> str:
        """Local time of the last change."""
        try:
            return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed_ns / 1e9))
        except (ValueError, OverflowError, OSError):  # a year that no calendar has
            return "-"


class Index:
    """The entries of a folder, read again when their files change."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if there is no such folder."""
        if not os.path.isdir(folder):
            raise InputError(
                f"there is no folder {folder}. Give a folder that holds runs, or make some first."
            )
        self.folder = folder.resolve()
        self.left_out = False
        """Whether the folder holds more than is looked at."""
        self._known: dict[str, Entry] = {}
        self._newest_first: list[Entry] = []
        self._begun_s = -1.0

    def entries(self, asked_s: float | None = None) -> list[Entry]:
        """Every entry, the newest first, as of `asked_s` (time.monotonic) or later; None: as of now.

        Those who ask at the same time share one look at the folder.
        """
        if asked_s is not None and self._begun_s >= asked_s:
            return self._newest_first
        self._begun_s = time.monotonic()
        found: dict[str, Entry] = {}
        self.left_out = False
        for name, kind, path, signature in self._files():
            if len(found) == MOST_ENTRIES:
                self.left_out = True
                break
            entry = self._entry(name, kind, path, signature)
            if entry is not None:
                found[name] = entry
        self._known = found
        self._newest_first = sorted(found.values(), key=lambda entry: (-entry.changed_ns, entry.name))
        return self._newest_first

    def entry(self, name: str) -> Entry | None:
        """The entry of this name, if the folder has one now. The name is looked up, never opened."""
        known = self._known.get(name)
        if known is None:
            self.entries()
            return self._known.get(name)
        found = self._here(known.path)
        entry = self._entry(*found) if found is not None else None
        if entry is not None:
            self._known[name] = entry
        return entry

    def _entry(self, name: str, kind: str, path: Path, signature: Signature) -> Entry | None:
        known = self._known.get(name)
        if known is not None and known.signature == signature and known.kind == kind:
            return known
        return _described(name, kind, path, signature)

    def _here(self, path: Path) -> Found | None:
        """What is at the place of a known entry now; None for nothing, or for a link in its place."""
        if os.path.realpath(path) != str(path):
            return None
        if os.path.isdir(path):
            try:
                return next(self._in_folder(path, os.listdir(path)), None)
            except OSError:  # it has vanished
                return None
        return self._found("snapshot" if path.suffix == ".pickle" else "profile", path, [""])

    def _files(self) -> Iterator[Found]:
        for looked_into, (text, folders, files) in enumerate(os.walk(self.folder, followlinks=False)):
            if looked_into == MOST_FOLDERS:
                self.left_out = True
                return
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            inside = {"cells"} if SWEEP_FILE in files else set[str]()
            if {*RUN_FILES, *LOG_FILES} & set(files):
                inside.add("checkpoints")
            folders[:] = [name for name in folders if name not in inside]
            yield from self._in_folder(Path(text), files)

    def _in_folder(self, here: Path, files: list[str]) -> Iterator[Found]:
        """The sweep, the run, or the files that are entries by themselves."""
        regular = [name for name in sorted(files) if not name.startswith(".") and _is_regular(here / name)]
        linked = {name for name in {*RUN_FILES, *LOG_FILES} & set(files) if name not in regular}
        candidates: list[tuple[str, Path, list[str]]] = []
        if SWEEP_FILE in regular:
            candidates.append(("sweep", here, [SWEEP_FILE]))
        run = [name for name in RUN_FILES if name in regular]
        if here != self.folder and not linked and (run or set(LOG_FILES) <= set(regular)):
            kind = "run" if "profile.json" in run else "running" if is_held(here) else "stopped"
            if run and kind == "stopped":
                kind = "run"
            candidates.append((kind, here, run if kind == "run" else [*run, *LOG_FILES]))
        else:
            for name in regular:
                if name.endswith(".json") and name != SWEEP_FILE:
                    candidates.append(("profile", here / name, [""]))
                elif name.endswith(".pickle"):
                    candidates.append(("snapshot", here / name, [""]))
        for candidate in candidates:
            found = self._found(*candidate)
            if found is not None:
                yield found

    def _found(self, kind: str, path: Path, files: list[str]) -> Found | None:
        try:
            stats = [(name, os.lstat(path / name if name else path)) for name in files]
        except OSError:  # it has vanished
            return None
        signature = tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)
        return path.relative_to(self.folder).as_posix(), kind, path, signature


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _described(name: str, kind: str, path: Path, signature: Signature) -> Entry | None:
    """The entry with what its profile says; None for a JSON file that is no profile."""
    match kind:
        case "sweep":
            return _of_sweep(name, path, signature)
        case "snapshot":
            return Entry(name, "snapshot", path, signature)
        case "run" if signature[0][0] != "profile.json":
            return Entry(name, "run", path, signature)
        case "running" | "stopped":
            return _of_log(name, kind, path, signature)
        case _:
            pass
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


def _of_log(name: str, kind: Literal["running", "stopped"], path: Path, signature: Signature) -> Entry:
    try:
        log = read_log(path)
    except InputError as error:
        return Entry(name, kind, path, signature, problem=str(error))
    return Entry(
        name,
        kind,
        path,
        signature,
        answer=log.in_words(),
        model=log.model,
        peak_bytes=log.peak_bytes,
        step_s=log.step_s,
        tokens_per_s=log.tokens_per_s,
    )


def _of_sweep(name: str, path: Path, signature: Signature) -> Entry:
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
