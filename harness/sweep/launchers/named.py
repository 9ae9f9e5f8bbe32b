"""A launcher by its name, with the options of its engine. Imports no torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError, nearest
from harness.sweep.launchers.launcher import RemoteLauncher
from harness.sweep.launchers.ray_tasks import RayTasks
from harness.sweep.launchers.submitit_jobs import SubmititJobs
from harness.sweep.plan import Kind
from harness.system import parse_yaml

NAMES = ("submitit", "ray")


def launcher_named(
    name: str,
    options: Sequence[str],
    folder: Path,
    kind: Kind,
    device: str | None,
    tell: Callable[[str], None],
) -> RemoteLauncher:
    """The launcher `name` for a sweep in `folder`, with an engine's own options as KEY=VALUE.

    `tell` is called with sentences that a user should know while cells wait. Raises InputError where the
    engine is missing or does not take the options, before anything is written.
    """
    if name not in NAMES:
        raise InputError(
            f"--launcher {name}: there is no such launcher.{nearest(name, NAMES)} There are "
            f"{' and '.join(NAMES)}."
        )
    if kind == "napkin":
        raise InputError(f"--launcher {name}: napkin takes milliseconds. Leave --launcher out.")
    if device is not None and ":" in device:
        raise InputError(f"--device {device}: the engine gives each cell a GPU. Give --device cuda or cpu.")
    given = _options(options)
    on_gpu = kind == "measured" and device != "cpu"
    if name == "submitit":
        return SubmititJobs(given, folder, on_gpu=on_gpu)
    return RayTasks(given, on_gpu=on_gpu, tell=tell)


def _options(given: Sequence[str]) -> dict[str, Any]:
    """The options in texts KEY=VALUE, values as YAML reads them: numbers are numbers, {a: 1} is a mapping."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--launcher-option {text}: write KEY=VALUE, for example slurm_partition=gpu.")
        options[name.strip()] = parse_yaml(value, f"--launcher-option {name.strip()}")
    return options
