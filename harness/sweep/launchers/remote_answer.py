"""Answers a cell on another machine, whose code, versions and settings must be the sweep's: else it is
refused.

Imports no torch.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.sweep.cell import Outcome, answer
from harness.sweep.folder import cell_facts, write_outcome
from harness.sweep.launchers.launcher import Question
from harness.system import quiet_libraries

MOST_AT_ONCE = 100
"""How many cells an engine is given at the same time without --jobs: it has a queue of its own."""
IN_WORDS = {
    "code": "harness's code",
    "hardware": "the device's table or calibration",
    "model": "the model's config",
}


@dataclass(frozen=True)
class Assignment:
    """What another machine is given: the question, and what its answer depends on here."""

    question: Question
    machine: Mapping[str, Any]
    facts: Mapping[str, Any]
    """The `cell_facts` here (sweep/folder.py)."""
    working_folder: str
    """The folder that paths in a recipe are relative to."""
    keep_in: str | None = None
    """A sweep's folder that every machine sees: the answer is kept there even if nothing waits for it."""


def assignment(question: Question, machine: Mapping[str, Any], keep_in: Path | None = None) -> Assignment:
    """The assignment for `question`, as things are here."""
    return Assignment(
        question,
        machine,
        cell_facts(question.cell, question.kind, question.device, machine),
        os.getcwd(),
        None if keep_in is None else str(keep_in.absolute()),
    )


def answered(task: Assignment) -> str:
    """Answer on the other machine, in a process of its own. Returns the outcome as JSON."""
    for name, value in task.facts["settings"].items():  # environment variables that change memory or time
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    if Path(task.working_folder).is_dir():
        os.chdir(task.working_folder)
    quiet_libraries()
    question = task.question
    assert question.cell.recipe is not None
    difference = _difference(task)
    if difference is None:
        outcome = answer(question.kind, question.cell.recipe, question.cell.hardware, question.device)
    else:
        outcome = Outcome("failed", difference)
    if task.keep_in is not None:
        write_outcome(Path(task.keep_in), question.key, question.cell, outcome)
    return json.dumps(outcome.as_json())


def read_answer(text: str, origin: str) -> Outcome:
    """The outcome in what `answered` returned. Raises InputError naming `origin` for anything else."""
    return Outcome.from_json(json.loads(text), origin)


def _difference(task: Assignment) -> str | None:
    """Why this machine's answer would be to another question, in a sentence; None if it would not."""
    question = task.question
    here = cell_facts(question.cell, question.kind, question.device, task.machine)
    different: list[str] = []
    for name, there in task.facts.items():
        if here[name] == there or (name == "model" and None in (here[name], there)):
            continue  # the config of a model's id may not have been fetched on one of the machines
        if isinstance(there, dict):  # versions, settings
            ours = cast("dict[str, Any]", here[name])
            different += [
                f"{what} ({ours.get(what)} instead of {value})"
                for what, value in cast("dict[str, Any]", there).items()
                if ours.get(what) != value
            ]
        else:
            different.append(IN_WORDS.get(name, name))
    if not different:
        return None
    return (
        f"{platform.node()} would answer another question than was asked: other there is "
        f"{', '.join(different)}. Install the same on all machines, or share one environment among them"
    )
