"""accelerate's trackers: which there are, how each is opened, and which of them keep files."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.errors import InputError, nearest
from harness.track.jobs import PROJECT, Job

KEEPS_FILES = ("mlflow", "wandb")
"""The trackers that are given report and snapshot. Others get numbers alone."""
ARTIFACT = "harness"
"""The type of W&B's artifacts."""
AFTERWARDS = "recorded_step"
"""The axis of numbers that W&B gets after later steps (`log_afterwards`)."""


def known_trackers() -> list[str]:
    """The names of trackers that accelerate knows, sorted, whether their packages are installed or not."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return sorted(map(str, LOGGER_TYPE_TO_CLASS))


def tracker_names(given: Iterable[str]) -> list[str]:
    """The trackers named in `given`, whose texts hold one name or several with commas, without repetition.

    Raises InputError for a name that accelerate does not know, before anything runs.
    """
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    known = known_trackers() if names else []
    for name in names:
        if name not in known:
            raise InputError(
                f"--track {name}: there is no such tracker.{nearest(name, known)} There are "
                f"{', '.join(known)}."
            )
    return list(dict.fromkeys(names))


class OpenTracker:
    """One run in one tracker. Errors of the tracker's library are passed on: the caller says what failed."""

    def __init__(self, job: Job) -> None:
        """Open the run and report its configuration."""
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState(cpu=True)  # accelerate's loggers need it
        self.kind = job.tracker
        arguments, options = _opening(job)
        self._tracker: Any = LOGGER_TYPE_TO_CLASS[job.tracker](*arguments, **options)
        self._tracker.start()
        self._tracker.store_init_configuration(job.config)

    @property
    def where(self) -> str:
        """Where the run can be looked at: an address, or a folder."""
        inside = self._tracker.tracker
        match self.kind:
            case "tensorboard":
                return str(inside.log_dir)
            case "wandb":
                return str(inside.url or inside.dir)
            case "mlflow":
                return str(inside.info.artifact_uri)
            case _:
                return str(getattr(inside, "url", None) or self.kind)

    def log(self, values: dict[str, float], step: int, *, afterwards: bool = False) -> None:
        """Report numbers of a step, counted from 0; `afterwards`: after those of later steps.

        W&B takes no number for a past step. There they have an axis of their own, AFTERWARDS, whose value is
        the step.
        """
        if afterwards and self.kind == "wandb":
            for name in values:
                self._tracker.tracker.define_metric(name, step_metric=AFTERWARDS)
            self._tracker.log({**values, AFTERWARDS: step})
        else:
            self._tracker.log(values, step=step)

    def attach(self, files: Iterable[Path]) -> None:
        """Keep the files with the run, if this tracker keeps files."""
        for file in files:
            if self.kind == "mlflow":
                self._tracker.log_artifact(str(file))
            elif self.kind == "wandb":
                run = self._tracker.tracker
                run.log_artifact(str(file), name=f"{file.stem}-{run.id}", type=ARTIFACT)

    def close(self) -> None:
        """Send what is left. Nothing can be reported after it."""
        self._tracker.finish()


def _opening(job: Job) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The tracker's arguments. By position: the project, or where runs have none, the run's name and folder.
    By name: the run's name, and a place in the run folder for files if the user chose none."""
    name, folder = job.name, Path(job.folder)
    match job.tracker:
        case "tensorboard":
            return (name.replace("/", "_"), str(folder / "tensorboard")), {}
        case "aim":
            return (name, job.folder), {}
        case "wandb":
            place = os.environ.get("WANDB_DIR", job.folder)
            options = {"name": name, "dir": place, "settings": {"console": "off"}}
            return (os.environ.get("WANDB_PROJECT", PROJECT),), options
        case "dvclive":
            return (), {"dir": str(folder / "dvclive")}
        case "swanlab":
            return (PROJECT,), {"experiment_name": name, "logdir": str(folder / "swanlog")}
        case other:
            named = {"mlflow": "run_name", "trackio": "name", "clearml": "task_name"}
            return (PROJECT,), {named[other]: name} if other in named else {}
