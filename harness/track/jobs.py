"""What is reported to a tracker: a recipe as configuration, a log's lines and a profile as named numbers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.step_profile import StepProfile

PROJECT = "harness"
"""The project, or experiment, that runs belong to where the tracker's own variables name none."""


@dataclass
class Job:
    """One run to report to one tracker."""

    tracker: str
    folder: str
    """The run folder: log.jsonl grows in it, and a tracker that writes files may write them into it."""
    name: str
    config: dict[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    values: dict[str, float] | None = None
    """Numbers of a run that is over, such as a cell of a sweep. None: the folder's log is followed."""
    attach: list[str] = field(default_factory=list[str])
    """Files to keep with the run, where the tracker keeps files."""
    passed_over: int | None = None
    """The inode of the log that a resumed run has already, and writes anew: it is not followed."""


def recipe_config(recipe: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """A recipe's fields as trackers take them: numbers, booleans and text. Lists are joined by commas."""
    config: dict[str, str | int | float | bool] = {}
    for name, value in recipe.items():
        if isinstance(value, str | int | float | bool):
            config[name] = value
        elif value is None:
            config[name] = "none"
        elif type(value) in (list, tuple):
            config[name] = ",".join(map(str, value)) or "none"
        else:
            config[name] = json.dumps(value)
    return config


def step_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one line of log.jsonl: `loss`, `tokens_per_s`, time/<phase>_s, memory/<what>_bytes.

    What is null in the line, such as the loss of a nan, is left out.
    """
    values: dict[str, float] = {}
    for name, value in line.items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_bytes"):
            name = f"memory/{name}"
        elif name.endswith("_s") and name != "tokens_per_s":
            name = f"time/{name}"
        values[name] = value
    return values


def profile_values(profile: StepProfile) -> dict[str, float]:
    """A profile's numbers: at_peak/<category>_bytes, phase/<phase>/..., and profile/... of the whole step."""
    memory, step = profile.memory, profile.step
    known: dict[str, float | None] = {
        "profile/peak_allocated_bytes": memory.peak_allocated_bytes,
        "profile/peak_reserved_bytes": memory.peak_reserved_bytes,
        "profile/process_bytes": memory.process_bytes,
        "profile/step_s": step.time_s.median,
        "profile/tokens_per_s": step.tokens_per_s,
        "profile/mfu": step.mfu,
    }
    for category, size in memory.at_peak.by_category().items():
        known[f"at_peak/{category}_bytes"] = size
    for phase, stats in profile.phases.items():
        known[f"phase/{phase}/time_s"] = stats.time_s.median
        known[f"phase/{phase}/peak_allocated_bytes"] = stats.peak_allocated_bytes
        known[f"phase/{phase}/peak_reserved_bytes"] = stats.peak_reserved_bytes
    return {name: value for name, value in known.items() if value is not None}


def values_by_step(profile: StepProfile) -> dict[int, dict[str, float]]:
    """memory/at_peak/<category>_bytes of each recorded step, by the step's number."""
    return {
        peak.step: {
            f"memory/at_peak/{name}": size
            for name, size in peak.at_peak.model_dump(exclude_none=True).items()
        }
        for peak in profile.memory.at_peak_by_step
    }
