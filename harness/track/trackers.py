"""accelerate's trackers: which there are, how each is opened, and which of them keep files."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness.errors import InputError, nearest
from harness.track.told import Told

PROJECT = "harness"
"""The project, or experiment, that runs belong to where the tracker's own variables name none."""
KEEPS_FILES = ("mlflow", "wandb")
"""The trackers that are given report and snapshot. Others get numbers alone."""
ARTIFACT = "harness"
"""The type of W&B's artifacts."""
AFTERWARDS = "recorded_step"
"""The axis of numbers that W&B gets after later steps (`Told.afterwards`)."""


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


def tell(kind: str, run: Told, say: Callable[[str], None]) -> None:
    """Tell a tracker a run, and `say` where it can be looked at. Errors of the tracker's library are passed
    on, after what it has taken was sent."""
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # accelerate's loggers need it
    arguments, options = _opening(kind, run)
    tracker: Any = LOGGER_TYPE_TO_CLASS[kind](*arguments, **options)
    tracker.start()
    try:
        tracker.store_init_configuration(run.config)
        say(_where(kind, tracker.tracker))
        for step, values in run.steps:
            tracker.log(values, step=step)
        for step, values in run.afterwards:
            if kind == "wandb":  # takes no number for a past step: there they have an axis of their own
                for name in values:
                    tracker.tracker.define_metric(name, step_metric=AFTERWARDS)
                tracker.log({**values, AFTERWARDS: step})
            else:
                tracker.log(values, step=step)
        for file in map(Path, run.files):
            if kind == "mlflow":
                tracker.log_artifact(str(file))
            elif kind == "wandb":
                inside = tracker.tracker
                inside.log_artifact(str(file), name=f"{file.stem}-{inside.id}", type=ARTIFACT)
    finally:
        tracker.finish()


def _where(kind: str, inside: Any) -> str:
    """Where a run can be looked at: an address, or a folder."""
    match kind:
        case "tensorboard":
            return str(inside.log_dir)
        case "wandb":
            return str(inside.url or inside.dir)
        case "mlflow":
            return str(inside.info.artifact_uri)
        case _:
            return str(getattr(inside, "url", None) or kind)


def _opening(kind: str, run: Told) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The tracker's arguments. By position: the project, or where runs have none, the run's name and folder.
    By name: the run's name, and a place in the run folder for files if the user chose none."""
    name, folder = run.name, Path(run.folder)
    match kind:
        case "tensorboard":
            return (name.replace("/", "_"), str(folder / "tensorboard")), {}
        case "aim":
            return (name, run.folder), {}
        case "wandb":
            place = os.environ.get("WANDB_DIR", run.folder)
            options = {"name": name, "dir": place, "settings": {"console": "off"}}
            return (os.environ.get("WANDB_PROJECT", PROJECT),), options
        case "dvclive":
            return (), {"dir": str(folder / "dvclive")}
        case "swanlab":
            return (PROJECT,), {"experiment_name": name, "logdir": str(folder / "swanlog")}
        case other:
            named = {"mlflow": "run_name", "trackio": "name", "clearml": "task_name"}
            return (PROJECT,), {named[other]: name} if other in named else {}
