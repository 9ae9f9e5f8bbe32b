"""`harness validate`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import JsonOnStdout, MemorySize
from harness.cli.exit_status import BEYOND_TOLERANCE
from harness.cli.terminal.terminal import Terminal, say
from harness.errors import InputError
from harness.recipe import Recipe
from harness.step_profile import StepProfile
from harness.system import complain, quiet_libraries, stdout_kept_for_json

if TYPE_CHECKING:
    from harness.answers import Comparison

EXAMPLES = """
Examples:
  harness validate llama-3.2-1b-bf16 hardware=h200
  harness validate profiles/h200/*.measured.json --tolerance 0.02
  harness validate smoke --measure
"""


def validate(
    answers: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|PROFILE.json|RUN... [KEY=VALUE]... [hardware=NAME]",
            help="Recipes (predicted here, and measured where profiles/ has a measurement), or profiles "
            "and run folders written by harness (what is missing is predicted).",
        ),
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Fail (exit status 1) when the peak allocated bytes of a prediction are off by more than "
            "this fraction, e.g. 0.02."
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure each recipe here and now.")] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Run each recipe on a virtual GPU too, here and now.")
    ] = False,
    memory: MemorySize = None,
    as_json: JsonOnStdout = False,
) -> None:
    """Put napkin, simulated, emulated and measured side by side, with what is unexplained, and where."""
    from harness.answers import compare, complete, gather
    from harness.cli.terminal.comparison import print_comparison, print_summary

    if tolerance is not None and not tolerance >= 0:
        raise InputError(f"--tolerance {tolerance}: give a fraction of at least 0, e.g. 0.02.")
    comparisons: list[Comparison] = []
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        people = Terminal(stderr=as_json)
        for case in gather(answers, _measured if measure else None, memory, emulate=emulate):
            complete(case)
            try:
                comparison = compare(case.profiles, case.name)
            except InputError as error:  # the notes say why answers are missing
                raise InputError(f"{error}{''.join(f' Note: {note}' for note in case.notes)}") from None
            comparisons.append(comparison)
            print_comparison(people, comparison)
            for note in case.notes:
                say(people, f"note: {note}")
        if len(comparisons) > 1:
            print_summary(people, comparisons)
    if as_json:
        print(json.dumps({"comparisons": [comparison.as_json() for comparison in comparisons]}, indent=1))
    if tolerance is not None:
        beyond = [f"{c.name} {source}" for c in comparisons for source in c.beyond(tolerance)]
        if beyond:
            message = f"peak allocated is off by more than {100 * tolerance:g}%: {', '.join(beyond)}"
            raise typer.Exit(complain(message, BEYOND_TOLERANCE))


def _measured(name: str, recipe: Recipe) -> StepProfile:
    from harness.cli.running.measuring import measured_with_progress
    from harness.run_folder import RunFolder

    return measured_with_progress(recipe, RunFolder(None, name, recipe))
