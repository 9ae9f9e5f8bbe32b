"""What `harness serve` shows: the runs, profiles, snapshots and sweeps in a folder. Imports no torch.

Symbolic links are not followed, wherever they point: nothing outside the folder is read. What vanishes while
the folder is read is left out.
"""

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from harness.errors import InputError
from harness.serve.log import read_log
from harness.step_profile import StepProfile
from harness.sweep import Sweep
from harness.system import is_held

MOST_ENTRIES = 20_000
MOST_FOLDERS = 100_000
"""Looked into: a folder that somebody names may be the whole disk."""
RUN_FILES = ("profile.json", "snapshot.pickle", "snapshot.json")
LOG_FILES = ("log.jsonl", "recipe.yaml", "command.json")
"""Of a run that has not come to its profile: its log, and what it is about."""
LONGEST_SUBJECT = 200
SWEEP_FILE = "sweep.json"
Kind = Literal["run", "running", "stopped", "profile", "snapshot", "sweep"]
Signature = tuple[tuple[str, int, int], ...]


class Found(NamedTuple):
    """What may be an entry, as the first fields of one."""

    name: str
    kind: Kind
    path: Path
    signature: Signature


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
        for there in self._files():
            if len(found) == MOST_ENTRIES:
                self.left_out = True
                break
            entry = self._entry(there)
            if entry is not None:
                found[there.name] = entry
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
        entry = self._entry(found) if found is not None else None
        if entry is not None:
            self._known[name] = entry
        return entry

    def _entry(self, found: Found) -> Entry | None:
        known = self._known.get(found.name)
        if known is not None and (known.signature, known.kind) == (found.signature, found.kind):
            return known
        return _described(found)

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
        candidates: list[tuple[Kind, Path, list[str]]] = []
        if SWEEP_FILE in regular:
            candidates.append(("sweep", here, [SWEEP_FILE]))
        run = [name for name in RUN_FILES if name in regular]
        logged = [name for name in LOG_FILES if name in regular]
        if here != self.folder and not linked and (run or ("log.jsonl" in logged and len(logged) > 1)):
            held = "profile.json" not in run and is_held(here)
            kind: Kind = "running" if held else "run" if run else "stopped"
            candidates.append((kind, here, run if kind == "run" else [*run, *logged]))
        else:
            for name in regular:
                if name.endswith(".json") and name != SWEEP_FILE:
                    candidates.append(("profile", here / name, [""]))
                elif name.endswith(".pickle"):
                    candidates.append(("snapshot", here / name, [""]))
        yield from filter(None, (self._found(*candidate) for candidate in candidates))

    def _found(self, kind: Kind, path: Path, files: list[str]) -> Found | None:
        try:
            stats = [(name, os.lstat(path / name if name else path)) for name in files]
        except OSError:  # it has vanished
            return None
        signature = tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)
        return Found(path.relative_to(self.folder).as_posix(), kind, path, signature)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _described(found: Found) -> Entry | None:
    """The entry with what its profile says; None for a JSON file that is no profile."""
    kind, path, signature = found[1:]
    match kind:
        case "sweep":
            return _of_sweep(found)
        case "snapshot":
            return Entry(*found)
        case "run" if signature[0][0] != "profile.json":
            return Entry(*found)
        case "running" | "stopped":
            return _of_log(found)
        case _:
            pass
    try:
        profile = StepProfile.read(path / "profile.json" if kind == "run" else path)
    except InputError as error:
        return Entry(*found, problem=str(error)) if kind == "run" else None
    return Entry(
        *found,
        answer=profile.source if profile.oom is None else f"{profile.source}, out of memory",
        model=profile.subject[:LONGEST_SUBJECT],
        device=profile.hardware.name,
        peak_bytes=profile.memory.peak_allocated_bytes,
        step_s=profile.step.time_s.median,
        tokens_per_s=profile.step.tokens_per_s,
    )


def _of_log(found: Found) -> Entry:
    try:
        log = read_log(found.path)
    except InputError as error:
        return Entry(*found, problem=str(error))
    return Entry(
        *found,
        answer=log.in_words(),
        model=log.model,
        peak_bytes=log.peak_bytes,
        step_s=log.step_s,
        tokens_per_s=log.tokens_per_s,
    )


def _of_sweep(found: Found) -> Entry:
    try:
        sweep = Sweep.read(found.path / SWEEP_FILE)
    except InputError as error:
        return Entry(*found, problem=str(error))
    answer = f"{sweep.kind}, {len(sweep.cells)} cells of {', '.join(sweep.axes)}"
    return Entry(*found, answer=answer, model=str(sweep.base.get("model", "-")), device=sweep.hardware or "-")
