"""The folder of a run: recipe.yaml, log.jsonl, snapshot.pickle, profile.json, checkpoints/.

A run of `harness watch` has command.json, the command that was watched, in place of recipe.yaml.
"""

import json
import os
import re
import weakref
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from pydantic_core import to_json

from harness.errors import InputError
from harness.recipe import Recipe, recipe_yaml
from harness.run_folder.checkpoint_files import checkpoints
from harness.run_folder.collected import RANKS, folder_of_rank, rank_of
from harness.step_profile import StepProfile
from harness.system import (
    FolderLock,
    is_object,
    make_folder,
    parse_json,
    read_whole,
    recipes_folder,
    refuse_held,
    write_whole,
)


class LogFile:
    """A file of JSON lines, opened at the first line and closed by `close` or with its last reference."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        """The descriptor; None while the file is not open."""
        self._closing: Any = None

    def append(self, line: dict[str, Any]) -> None:
        """Write `line`, whose numbers are finite, as one line of JSON. Raises OSError if that fails; then no
        part of the line is in the file."""
        rest = memoryview(to_json(line) + b"\n")
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self.close()  # somebody removed the file, and nobody would read what is written to it
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._closing = weakref.finalize(self, os.close, self._file)
        written = os.write(self._file, rest)
        while written < len(rest):  # the disk is all but full
            try:
                written += os.write(self._file, rest[written:])
            except OSError:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise

    def close(self) -> None:
        """Close the file. The next `append` opens it again."""
        if self._file is not None:
            self._file = None
            self._closing()


RUNS = Path("profiles/runs")
"""Where the folders of runs go for which the user names none."""
MAX_LOG_BYTES = 2**28
"""The largest log that a run can be resumed with."""
FILES = ("recipe.yaml", "command.json", "log.jsonl", "snapshot.pickle", "profile.json")
"""The files by which a folder is known to hold a run already, profile.json last."""
MAX_COMMAND_BYTES = 2**20


class RunFolder:
    """The folder of a run, made at the first write, so that a run which cannot begin leaves nothing behind.

    The log grows a line at a time; every other file is written whole or not at all, profile.json last. From
    the first write until then no other run can write there.
    """

    def __init__(
        self, path: Path | None, name: str, about: Recipe | list[str], resume: Path | None = None
    ) -> None:
        """`path` is the folder that the user named, or None for profiles/runs/<name>-<time>. `about` is what
        runs: a recipe, or the words of a command.

        `resume` is the folder of an earlier run: the attribute `checkpoint` is its last checkpoint, and the
        run goes on in that folder, or in `path` if that is given. Raises InputError if the folder is taken or
        cannot be written, and if there is nothing to resume.
        """
        self.path = path or resume or new_path(name)
        self.recipe_name = name
        self._about = about
        self._resume = resume
        self.checkpoint = None if resume is None else last_checkpoint(resume)
        nearest = next(p for p in [self.path, *self.path.absolute().parents] if os.path.lexists(p))
        if not os.path.isdir(nearest):
            raise InputError(f"--out {self.path}: {nearest} is a file. Give a folder.")
        self._goes_on = resume is not None and self.path.absolute() == resume.absolute()
        self._lock: FolderLock | None = None
        self._log = LogFile(self.path / "log.jsonl")
        refuse_held(self.path, f"--out {self.path}")
        has_ranks = isinstance(about, Recipe) and about.distributed
        self._refuse_taken((*FILES, RANKS) if has_ranks else FILES)
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(
                f"--out {self.path}: cannot write in {nearest}. Give a folder that can be written."
            )

    def resume_log(self, steps_done: int) -> None:
        """Begin the log with the lines that the resumed run wrote about its first `steps_done` steps.

        Lines about later steps, which are run again, are left out; so is a line cut off by a power failure.
        """
        assert self._resume is not None
        self._create()
        self._write_about()  # the resumed run may have another number of steps
        log = self._resume / "log.jsonl"
        kept = [line for line in _lines(log) if _step_of(line, log) < steps_done]
        write_whole(self.path / "log.jsonl", "".join(kept))

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to log.jsonl. Raises InputError if that fails (a full disk)."""
        self._create()
        try:
            self._log.append(line)
        except OSError as error:
            raise InputError(
                f"cannot write {self.path / 'log.jsonl'}: {error.strerror}. Make room, or give another --out."
            ) from None

    def write_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Write snapshot.pickle."""
        from harness.snapshot import write_snapshot

        self._create()
        write_snapshot(self.path / "snapshot.pickle", snapshot)

    def write_profile(self, profile: StepProfile, *, last: bool = True) -> None:
        """Write profile.json, with the recipe's name. After the `last` profile other runs are let in."""
        if profile.recipe is not None:
            profile.provenance.setdefault("recipe_name", self.recipe_name)
        lock = self._create()
        write_whole(self.path / "profile.json", profile.to_json() + "\n")
        if last:
            self._log.close()
            lock.release()

    def hold(self) -> None:
        """Keep other runs out from now on. Raises InputError if the folder holds another run by now."""
        if self._lock is not None:
            return
        make_folder(self.path)
        lock = FolderLock(self.path, f"--out {self.path}")
        self._refuse_taken()  # a run that began later may have ended here since
        self._lock = lock

    def _create(self) -> FolderLock:
        """Hold the folder, with recipe.yaml or command.json in it. Returns the lock."""
        self.hold()
        assert self._lock is not None
        if not (self.path / self._about_file).exists():
            self._write_about()
        return self._lock

    @property
    def _about_file(self) -> str:
        return "command.json" if isinstance(self._about, list) else "recipe.yaml"

    def _write_about(self) -> None:
        about = self._about
        text = json.dumps({"command": about}) + "\n" if isinstance(about, list) else self._yaml(about)
        write_whole(self.path / self._about_file, text)

    def forget_ranks(self) -> None:
        """Remove the profiles and snapshots that the ranks of the resumed run left in this folder."""
        for rank in sorted((self.path / RANKS).glob("*")) if self._goes_on else ():
            if rank_of(rank) is not None:
                for name in ("profile.json", "snapshot.pickle"):
                    (rank / name).unlink(missing_ok=True)

    def _refuse_taken(self, names: Sequence[str] = FILES) -> None:
        """Raise InputError if the folder holds files of another run."""
        taken = [] if self._goes_on else [file for file in names if os.path.lexists(self.path / file)]
        if taken:
            raise InputError(
                f"--out {self.path}: it already holds a {taken[-1]}. Give another folder, or remove it."
            )

    def _yaml(self, recipe: Recipe) -> str:
        """The recipe as YAML. Where this folder and a file that the recipe names are both in this checkout,
        the file's path is relative to this folder, so that it is right in every other checkout too.
        """
        try:
            checkout = recipes_folder().parent.resolve()
        except InputError:  # harness is installed, and there is no checkout
            return recipe_yaml(recipe)
        here = self.path.resolve()
        paths = {name: Path(getattr(recipe, name)) for name in ("model", "data")}
        relative = {
            name: os.path.relpath(path, here)
            for name, path in paths.items()
            if path.is_absolute() and path.is_relative_to(checkout) and here.is_relative_to(checkout)
        }
        return recipe_yaml(recipe.model_copy(update=relative))


def new_path(name: str) -> Path:
    """The path of a folder that does not exist yet, for a run called `name`: profiles/runs/<name>-<time>,
    with a number at its end if another run began within the same second."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    first = RUNS / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{stamp}"
    number, path = 1, first
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def read_command(folder: Path) -> list[str]:
    """The words of the command that `harness watch` ran into `folder`. Raises InputError."""
    path = folder / "command.json"
    try:
        found = parse_json(read_whole(path, MAX_COMMAND_BYTES), MAX_COMMAND_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    words = (
        cast("list[object]", found["command"])
        if is_object(found) and isinstance(found.get("command"), list)
        else []
    )
    command = [word for word in words if isinstance(word, str)]
    if not words or len(command) != len(words):
        raise InputError(f'{path} does not hold {{"command": [word, ...]}}, as `harness watch` writes it.')
    return command


def last_checkpoint(run: Path) -> Path:
    """The last checkpoint in a run folder. Raises InputError if there is none."""
    found = checkpoints(run / "checkpoints")
    if not found:
        what = "holds no checkpoint" if os.path.isdir(run) else "is no folder"
        raise InputError(
            f"--resume {run}: it {what}. Give the folder of a run whose recipe has checkpoint_every: N."
        )
    return found[-1]


def _lines(log: Path) -> list[str]:
    """The whole lines of a log; none if there is no log."""
    try:
        text = read_whole(log, MAX_LOG_BYTES).decode()
        return [line for line in text.splitlines(True) if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--resume: cannot read {log}: {error}.") from None


def _step_of(line: str, log: Path) -> int:
    """The number of the step that a line of a log is about. Raises InputError."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InputError(
            f"--resume: {log} has a line that is not about a step: {line[:80]!r}. Remove the line."
        ) from None


class RankFolder(RunFolder):
    """The run folder as one of several ranks writes to it: rank 0 writes the log, and each rank its own
    profile and snapshot. The run's profile is made of all ranks' and written last (collected.py)."""

    def __init__(self, path: Path | None, name: str, recipe: Recipe, resume: Path | None, rank: int) -> None:
        """On rank 0 the arguments are as for RunFolder, and so is the InputError. The other ranks are given
        the `path` that rank 0 has."""
        self._rank = rank
        if rank == 0:
            super().__init__(path, name, recipe, resume)
            return
        assert path is not None
        self.path, self.recipe_name = path, name
        self.checkpoint = None if resume is None else last_checkpoint(resume)

    def resume_log(self, steps_done: int) -> None:
        """As RunFolder, on rank 0; nothing on the others."""
        if self._rank == 0:
            super().resume_log(steps_done)

    def log(self, line: dict[str, Any]) -> None:
        """As RunFolder, on rank 0; nothing on the others."""
        if self._rank == 0:
            super().log(line)

    def write_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Write snapshot.pickle into this rank's folder."""
        from harness.snapshot import write_snapshot

        write_snapshot(self._own() / "snapshot.pickle", snapshot)

    def write_profile(self, profile: StepProfile, *, last: bool = True) -> None:
        """Write this rank's profile. Rank 0 keeps other runs out until `write_run`."""
        profile.provenance.setdefault("recipe_name", self.recipe_name)
        write_whole(self._own() / "profile.json", profile.to_json() + "\n")

    def write_run(self, profile: StepProfile) -> None:
        """Write the profile.json of the run, last of all. Only rank 0 calls it."""
        super().write_profile(profile)

    def _own(self) -> Path:
        """This rank's folder, which is made if need be."""
        if self._rank == 0:
            self._create()
        own = folder_of_rank(self.path, self._rank)
        make_folder(own)
        return own
