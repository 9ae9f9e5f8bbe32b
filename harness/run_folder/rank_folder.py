"""One run folder of several ranks: rank 0 writes the log, and each rank its own profile.

The run's own profile is written at the end, when all is known (run_folder/collected.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.recipe import Recipe
from harness.run_folder.collected import folder_of_rank
from harness.run_folder.run_folder import RunFolder, last_checkpoint
from harness.step_profile import StepProfile
from harness.system import write_whole


class RankFolder(RunFolder):
    """What measure/measured_run.py writes to, on one of several ranks."""

    def __init__(self, path: Path | None, name: str, recipe: Recipe, resume: Path | None, rank: int) -> None:
        """`path` is what rank 0 chose, who may have none. Raises InputError on rank 0, as RunFolder does."""
        self._rank = rank
        if rank == 0:
            super().__init__(path, name, recipe, resume)
            return
        assert path is not None
        self.path, self.recipe_name = path, name
        self.checkpoint = None if resume is None else last_checkpoint(resume)

    def resume_log(self, steps_done: int) -> None:
        if self._rank == 0:
            super().resume_log(steps_done)

    def log(self, line: dict[str, Any]) -> None:
        if self._rank == 0:
            super().log(line)

    def write_snapshot(self, snapshot: dict[str, Any]) -> None:
        from harness.snapshot import write_snapshot

        write_snapshot(self._own() / "snapshot.pickle", snapshot)

    def write_profile(self, profile: StepProfile, *, last: bool = True) -> None:
        """This rank's. The folder stays rank 0's, until `write_run`."""
        profile.provenance.setdefault("recipe_name", self.recipe_name)
        write_whole(self._own() / "profile.json", profile.to_json() + "\n")

    def write_run(self, profile: StepProfile) -> None:
        """On rank 0: the run's own profile.json, last of all."""
        super().write_profile(profile)

    def _own(self) -> Path:
        if self._rank == 0:
            self._create()
        own = folder_of_rank(self.path, self._rank)
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {self.path}: cannot make the folder {own}: {error.strerror}.") from None
        return own
