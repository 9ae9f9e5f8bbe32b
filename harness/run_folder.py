"""The folder of a run: recipe.yaml, log.jsonl, snapshot.pickle, profile.json. Each whole or not there."""

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


class RunFolder:
    """Made at the first write, so that a run which cannot begin leaves nothing behind."""

    def __init__(self, path: Path | None, name: str, recipe: Recipe) -> None:
        """`path` as the user gave it, or None for profiles/runs/<name>-<time>. InputError if it is taken."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        self.path = path or _free(RUNS / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{stamp}")
        self._recipe = recipe
        if self.path.is_file():
            raise InputError(f"--out: {self.path} is a file. Give a folder.")
        if (self.path / "profile.json").exists() or (self.path / "log.jsonl").exists():
            raise InputError(f"--out: {self.path} already holds a run. Give another folder, or remove it.")
        nearest = next(p for p in [self.path, *self.path.absolute().parents] if p.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise InputError(
                f"--out: {self.path}: cannot write in {nearest}. Give a folder that can be written."
            )

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to log.jsonl."""
        self._create()
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def write_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Write snapshot.pickle."""
        from harness.snapshot import write_snapshot

        self._create()
        write_snapshot(self.path / "snapshot.pickle", snapshot)

    def write_profile(self, profile: StepProfile) -> None:
        """Write profile.json, last: a folder with one is complete."""
        self._create()
        write_whole(self.path / "profile.json", profile.to_json() + "\n")

    def _create(self) -> None:
        if not (self.path / "recipe.yaml").exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "recipe.yaml", recipe_yaml(self._recipe))


def _free(path: Path) -> Path:
    """`path`, or with a number behind it if a run began within the same second."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
