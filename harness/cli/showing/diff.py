"""`harness diff`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.arguments import AsJson, MemorySize, asked_for
from harness.cli.exit_status import GREW
from harness.cli.terminal.lines import answer
from harness.errors import InputError
from harness.step_profile import StepProfile
from harness.system import complain

Found = tuple[tuple[str, str], tuple[StepProfile, StepProfile], tuple[dict[str, Any], dict[str, Any]] | None]
"""The names of the two that are compared, their profiles, and their snapshots where both have one."""

EXAMPLES = """
Examples:
  harness diff before/profile.json after
  harness diff before after --fail-above 5%
  harness diff llama-3.1-8b-lora --python old/bin/python --python new/bin/python
The first form takes profiles or run folders; the last simulates a recipe in two environments.
Exit status: 0 fine, 2 bad input, 5 when a peak grew by more than --fail-above.
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
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="5%",
            help="Exit status 5 when the second's peak, or that of its evaluation, generation or saving, is "
            "larger by more than this: a percentage, a size such as 512MiB, or 0.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Where the bytes of two profiles differ, or of one recipe under two versions of the libraries."""
    from harness.answers import allowed, asked_by_one, beyond, diff_document, diff_lines, diff_profiles

    limit = None if fail_above is None else allowed(fail_above)
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
    grown = [] if limit is None else list(beyond(found, limit))
    answer(diff_document(found, names, limit), "\n".join(diff_lines(found, names)), as_json=as_json)
    if limit is not None and grown:
        raise typer.Exit(complain(f"{'; '.join(grown)}. {limit.text} is allowed.", GREW))


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

    recipe, *overrides = what
    _, loaded, hardware = asked_for(recipe, overrides, memory)
    (first, before), (second, after) = (simulated_by(path, loaded, hardware, memory) for path in pythons)
    names = (f"{recipe} by {pythons[0]}", f"{recipe} by {pythons[1]}")
    return names, (first, second), None if before is None or after is None else (before, after)
