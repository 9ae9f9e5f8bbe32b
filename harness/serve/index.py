"""The list that `harness serve` shows: runs, profiles, snapshots and sweeps in a folder. Imports no torch.

Symbolic links are not followed, wherever they point: nothing outside the folder is read. What vanishes while
the folder is read is left out.
"""

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness.errors import InputError
from harness.serve.log import read_log
from harness.step_profile import StepProfile
from harness.sweep import Sweep
from harness.system import is_held

MOST_ENTRIES = 10_000
"""The most entries that are listed, all on one page: half a kB each."""
MOST_FOLDERS = 100_000
"""The most folders that are looked into, since the folder that is served may be the whole disk."""
RUN_FILES = ("profile.json", "snapshot.pickle", "snapshot.json")
"""The files of which a run's report is made."""
LOG_FILES = ("log.jsonl", "recipe.yaml", "command.json")
"""The files of a run without a profile yet: its log, and its recipe or its command."""
LONGEST_SUBJECT = 200
"""The most characters of a model's name or a command that the list shows."""
SWEEP_FILE = "sweep.json"
Kind = Literal["run", "running", "stopped", "profile", "snapshot", "sweep"]
"""What an entry is. A run without a profile is `running` while a process holds its folder, else `stopped`."""
Signature = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and time of change in nanoseconds of every file that an entry is made of."""


@dataclass(frozen=True)
class Entry:
    """One row of the list: something that has a page."""

    name: str
    """Its path within the folder, with slashes, which the address of its page holds."""
    kind: Kind
    path: Path
    signature: Signature
    """The entry is read again when this changes."""
    answer: str = "-"
    """The profile's source, how far a run is, or what a sweep tries."""
    model: str = "-"
    device: str = "-"
    peak_bytes: int | None = None
    """The peak of allocated memory."""
    step_s: float | None = None
    """The median time of a step; of a run without a profile, the time of its last timed step."""
    tokens_per_s: float | None = None
    problem: str | None = None
    """Why it has no page; None where it has one."""

    @property
    def changed_ns(self) -> int:
        """The time of the last change, in nanoseconds since 1970, which a wrong clock may have set."""
        return max(changed_ns for _, _, changed_ns in self.signature)

    @property
    def changed(self) -> str:
        """The local time of the last change, as YYYY-MM-DD HH:MM; a dash for a year beyond the calendar."""
        try:
            return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed_ns / 1e9))
        except (ValueError, OverflowError, OSError):
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
        """Whether the folder holds more than the list does."""
        self._known: dict[str, Entry] = {}
        """The entries of the last look at the folder, by name."""
        self._newest_first: list[Entry] = []
        self._begun_s = -1.0
        """When that look began, by time.monotonic."""

    def entries(self, asked_s: float | None = None) -> list[Entry]:
        """Every entry, the newest first, as of `asked_s` (by time.monotonic) or later; None: as of now.

        Requests that came before the last look began share what it found.
        """
        if asked_s is not None and self._begun_s >= asked_s:
            return self._newest_first
        self._begun_s = time.monotonic()
        found: dict[str, Entry] = {}
        self.left_out = False
        for unread in self._unread_entries():
            if len(found) == MOST_ENTRIES:
                self.left_out = True
                break
            entry = self._entry(unread)
            if entry is not None:
                found[entry.name] = entry
        self._known = found
        self._newest_first = sorted(found.values(), key=lambda entry: (-entry.changed_ns, entry.name))
        return self._newest_first

    def _entry(self, unread: Entry) -> Entry | None:
        """The known entry where its files have not changed; else the entry read from them."""
        known = self._known.get(unread.name)
        if known is not None and (known.signature, known.kind) == (unread.signature, unread.kind):
            return known
        return _read_entry(unread)

    def _unread_entries(self) -> Iterator[Entry]:
        """Everything in the folder that may be an entry. The cells of a sweep and the checkpoints of a run
        belong to these, and hidden folders are passed over."""
        for number, (text, folders, files) in enumerate(os.walk(self.folder, followlinks=False)):
            if number == MOST_FOLDERS:
                self.left_out = True
                return
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            inside = {"cells"} if SWEEP_FILE in files else set[str]()
            if {*RUN_FILES, *LOG_FILES} & set(files):
                inside.add("checkpoints")
            folders[:] = [name for name in folders if name not in inside]
            yield from self._in_folder(Path(text), files)

    def _in_folder(self, here: Path, files: list[str]) -> Iterator[Entry]:
        """The sweep and the run that the folder `here` is, or else those of its `files` that are entries."""
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
        yield from filter(None, (self._unread(*candidate) for candidate in candidates))

    def _unread(self, kind: Kind, path: Path, files: list[str]) -> Entry | None:
        """An entry made of `files` in the folder `path`, or of `path` itself for [""], none of which is read
        yet; None where one of them has vanished."""
        try:
            stats = [(name, os.lstat(path / name if name else path)) for name in files]
        except OSError:
            return None
        signature = tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)
        return Entry(path.relative_to(self.folder).as_posix(), kind, path, signature)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _read_entry(unread: Entry) -> Entry | None:
    """The entry with what its files say; None for a JSON file that is no profile."""
    kind, path = unread.kind, unread.path
    if kind == "snapshot" or (kind == "run" and unread.signature[0][0] != "profile.json"):
        return unread
    try:
        if kind == "sweep":
            sweep = Sweep.read(path / SWEEP_FILE)
            answer = f"{sweep.kind}, {len(sweep.cells)} cells of {', '.join(sweep.axes)}"
            model = str(sweep.base.get("model", "-"))
            return replace(unread, answer=answer, model=model, device=sweep.hardware or "-")
        if kind in ("running", "stopped"):
            log = read_log(path)
            return replace(
                unread,
                answer=log.in_words(),
                model=log.model,
                peak_bytes=log.peak_bytes,
                step_s=log.step_s,
                tokens_per_s=log.tokens_per_s,
            )
        profile = StepProfile.read(path / "profile.json" if kind == "run" else path)
    except InputError as error:
        return None if kind == "profile" else replace(unread, problem=str(error))
    return replace(
        unread,
        answer=profile.source if profile.oom is None else f"{profile.source}, out of memory",
        model=profile.subject[:LONGEST_SUBJECT],
        device=profile.hardware.name,
        peak_bytes=profile.memory.peak_allocated_bytes,
        step_s=profile.step.time_s.median,
        tokens_per_s=profile.step.tokens_per_s,
    )
