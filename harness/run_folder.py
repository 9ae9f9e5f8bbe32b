"""The folder of a run: recipe.yaml, log.jsonl, snapshot.pickle, profile.json."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.files import write_whole
from harness.recipe import Recipe
from harness.recipe_file import recipe_yaml
from harness.step_profile import StepProfile

RUNS = Path("profiles/runs")
FILES = ("recipe.yaml", "log.jsonl", "snapshot.pickle", "profile.json")


class RunFolder:
    """Made at the first write, so that a run which cannot begin leaves nothing behind.

    The log grows a line at a time; every other file is written whole or not at all, profile.json last.
    """

    def __init__(self, path: Path | None, name: str, recipe: Recipe) -> None:
        """`path` as the user gave it, or None for profiles/runs/<name>-<time>.

        Raises InputError if it is taken or cannot be written.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        self.path = path or _free(RUNS / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{stamp}")
        self._recipe = recipe
        nearest = next(p for p in [self.path, *self.path.absolute().parents] if p.exists())
        if not nearest.is_dir():
            raise InputError(f"--out {self.path}: {nearest} is a file. Give a folder.")
        taken = [file for file in FILES if (self.path / file).exists()]
        if taken:
            raise InputError(
                f"--out {self.path}: it already holds a {taken[-1]}. Give another folder, or remove it."
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(
                f"--out {self.path}: cannot write in {nearest}. Give a folder that can be written."
            )

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to log.jsonl. Raises InputError if that fails (a full disk)."""
        self._create()
        path = self.path / "log.jsonl"
        try:
            with path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}.") from None

    def write_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Write snapshot.pickle."""
        from harness.snapshot import write_snapshot

        self._create()
        write_snapshot(self.path / "snapshot.pickle", snapshot)

    def write_profile(self, profile: StepProfile) -> None:
        """Write profile.json."""
        self._create()
        write_whole(self.path / "profile.json", profile.to_json() + "\n")

    def _create(self) -> None:
        if (self.path / "recipe.yaml").exists():
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {self.path}: cannot make the folder: {error.strerror}.") from None
        write_whole(self.path / "recipe.yaml", recipe_yaml(self._recipe))


def _free(path: Path) -> Path:
    """`path`, or with a number behind it if a run began within the same second."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
