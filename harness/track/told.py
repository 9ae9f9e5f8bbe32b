"""What is reported to a tracker: a recipe as configuration, a log's lines and a profile as named numbers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.run_folder import folder_of_rank, read_profile
from harness.step_profile import StepProfile

Values = dict[str, float]
Config = dict[str, str | int | float | bool]


@dataclass
class Told:
    """A run, as a tracker is told it."""

    name: str
    folder: str
    """The run folder: a tracker that writes files may write them into it."""
    config: Config
    steps: list[tuple[int, Values]]
    """Steps, counted from 0, and their numbers. Without any, the run is for the trackers that keep files."""
    afterwards: list[tuple[int, Values]] = field(default_factory=list[tuple[int, Values]])
    """Numbers of steps that are past, which are told at the end."""
    files: list[str] = field(default_factory=list[str])
    """Files to keep with the run, where the tracker keeps files."""


def told_of(folder: Path, name: str, config: Config) -> Told:
    """What the run in `folder` is told as, without files. Of a command on several ranks, rank 0's log is
    told; a run that was killed has no profile and may have no log."""
    log = folder_of_rank(folder, 0) / "log.jsonl"
    log = log if log.exists() else folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    logged = [json.loads(line) for line in lines if line.endswith("\n")]
    told = Told(name, str(folder.absolute()), config, [(line["step"], step_values(line)) for line in logged])
    try:
        profile = read_profile(folder)
    except InputError:
        return told
    told.steps.append((told.steps[-1][0] if told.steps else 0, profile_values(profile)))
    for peak in profile.memory.at_peak_by_step:
        sizes = peak.at_peak.model_dump(exclude_none=True)
        told.afterwards.append((peak.step, {f"memory/at_peak/{one}": size for one, size in sizes.items()}))
    return told


def recipe_config(recipe: Mapping[str, Any]) -> Config:
    """A recipe's fields as trackers take them: numbers, booleans and text. Lists are joined by commas."""
    config: Config = {}
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


def step_values(line: Mapping[str, Any]) -> Values:
    """The numbers of one line of log.jsonl: `loss`, `tokens_per_s`, time/<phase>_s, memory/<what>_bytes.

    What is null in the line, such as the loss of a nan, is left out.
    """
    values: Values = {}
    for name, value in line.items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_bytes"):
            name = f"memory/{name}"
        elif name.endswith("_s") and name != "tokens_per_s":
            name = f"time/{name}"
        values[name] = value
    return values


def profile_values(profile: StepProfile) -> Values:
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
