"""`harness diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.arguments import AsJson, MemorySize
from harness.cli.terminal.lines import tell
from harness.errors import InputError

if TYPE_CHECKING:
    from harness.step_profile import StepProfile

    Found = tuple[
        tuple[str, str], tuple[StepProfile, StepProfile], tuple[dict[str, Any], dict[str, Any]] | None
    ]
    """The names of both, their profiles, and their snapshots where there are any."""

EXAMPLES = """
Examples:

  harness diff before/profile.json after

  harness diff llama-3.1-8b-lora --python old/bin/python --python new/bin/python

The first form takes profiles or run folders; the second simulates a recipe in two environments.
"""


def diff(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="A B | RECIPE [KEY=VALUE]...", help="Two profiles or run folders; or a recipe."
        ),
    ],
    python: Annotated[
        list[str] | None,
        typer.Option(help="An environment's python, given twice: it simulates with its own libraries."),
    ] = None,
    memory: MemorySize = None,
    as_json: AsJson = False,
) -> None:
    """Where the bytes of two profiles differ, or of one recipe under two versions of the libraries."""
    from harness.answers import asked_by_one, diff_lines, diff_profiles

    if python:
        if len(python) != 2:
            raise InputError(
                f"--python is given {len(python)} times. Give it twice, once for each environment."
            )
        names, profiles, snapshots = _in_two_environments(what, python, memory)
    else:
        if memory is not None:
            raise InputError("--memory belongs to a recipe that is simulated: give --python twice too.")
        names, profiles, snapshots = _two_profiles(what)
    found = diff_profiles(*profiles)
    if snapshots is not None:
        found.divergences = asked_by_one(*snapshots)
    if as_json:
        print(json.dumps({"first": names[0], "second": names[1], **found.as_json()}, indent=1))
    else:
        tell("\n".join(diff_lines(found, names)))


def _two_profiles(what: list[str]) -> Found:
    from harness.run_folder import read_profile

    if len(what) != 2:
        raise InputError(
            f"there are {len(what)} arguments. Give two profiles or run folders, or a recipe with --python "
            "twice."
        )
    first, second = (read_profile(Path(text)) for text in what)
    return (what[0], what[1]), (first, second), None


def _in_two_environments(what: list[str], pythons: list[str], memory: str | None) -> Found:
    from harness.answers import simulated_by
    from harness.cli.arguments import asked_for

    recipe, *overrides = what
    _, loaded, hardware = asked_for(recipe, overrides, memory)
    (first, before), (second, after) = (simulated_by(path, loaded, hardware, memory) for path in pythons)
    names = (f"{recipe} by {pythons[0]}", f"{recipe} by {pythons[1]}")
    return names, (first, second), None if before is None or after is None else (before, after)
