"""`harness report`: runs, profiles and snapshots as a page, as Markdown, CSV or pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import InputError

if TYPE_CHECKING:
    from harness.hardware import Hardware
    from harness.recipe import Recipe
    from harness.report import ReportRun


PAGE = "report.html"

EXAMPLES = """
Examples:

  harness report profiles/runs/smoke-20260101-120000

  harness report one-run another-run --out both.html

  harness report measured.json simulated.json --markdown

  harness report snapshot.pickle --png slides
"""


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_PROFILE...",
            help="Run folders, profiles, or memory snapshots (pickle or JSON). Profiles of one recipe are "
            "put side by side; several runs are compared.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. Default: report.html in the run's folder, or here for anything else.",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The tables in GitHub's Markdown, on stdout or to --out.")
    ] = False,
    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="Every number, one a line, in bytes and seconds; on stdout or to --out."),
    ] = False,
    png: Annotated[
        Path | None,
        typer.Option(help="Write the charts as PNG pictures into this folder.", show_default=False),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Also simulate the recipe of a profile that has no simulated answer."
        ),
    ] = False,
) -> None:
    """Show what fills the memory and when, and what takes the time: one HTML file that opens offline."""
    from harness.cli.terminal.terminal import Terminal
    from harness.report import read_run, report_tables, section_of, to_csv, to_markdown, write_report

    wanted = [name for name, given in (("--markdown", markdown), ("--csv", as_csv), ("--png", png)) if given]
    if len(wanted) > 1:
        raise InputError(f"{' and '.join(wanted)} are given together. Choose one.")
    if png is not None and out is not None:
        raise InputError("--png DIR names the folder of the pictures already: leave --out away.")
    runs = _together([read_run(path) for path in paths], paths)
    for run in runs:
        _add_answers(run, simulate=simulate)
    people = Terminal(stderr=True)
    if png is not None:
        from harness.report import write_figures

        written = write_figures(runs, png)
    elif markdown or as_csv:
        tables = report_tables([section_of(run) for run in runs])
        if not tables:
            raise InputError("there is nothing to tabulate in a snapshot without a recorded history.")
        text = (to_markdown if markdown else to_csv)(tables)
        if out is None:
            print(text, end="")
            return
        from harness.system import write_whole

        write_whole(out, text)
        written = [out]
    else:
        target = out or _beside(paths)
        write_report(runs, target)
        written = [target]
    for path in written:
        people.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _beside(paths: Sequence[Path]) -> Path:
    """In the run's folder, when there is one run and it has a folder."""
    return paths[0] / PAGE if len(paths) == 1 and os.path.isdir(paths[0]) else Path(PAGE)


def _together(runs: Sequence[ReportRun], paths: Sequence[Path]) -> list[ReportRun]:
    """Bare profiles about the recipe of another run go to that run; equal names are told apart."""
    from harness.answers import different_fields

    kept: list[ReportRun] = []
    for run in runs:
        profile = run.profile
        about = next(
            (
                other
                for other in kept
                if profile is not None
                and run.history is None
                and other.profile is not None
                and profile.source not in [other.profile.source, *(answer.source for answer in other.answers)]
                and profile.recipe is not None
                and other.profile.recipe is not None
                and not different_fields(profile.recipe, other.profile.recipe)
            ),
            None,
        )
        if about is not None and profile is not None:
            about.answers.append(profile)
        else:
            kept.append(run)
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = str(path)
    return kept


def _add_answers(run: ReportRun, *, simulate: bool) -> None:
    """Predict what is missing beside a profile: napkin always, for it takes milliseconds."""
    from harness.answers import Case, complete
    from harness.hardware import DEFAULT_HARDWARE, find_hardware, table_device
    from harness.recipe import check_recipe
    from harness.system import quiet_libraries

    if run.profile is None:
        return
    if run.profile.recipe is None:
        run.notes.append("It is a command's: only a recipe has predictions to put beside it.")
        return
    try:
        recipe = check_recipe(run.profile.recipe, f"{run.name}: recipe")
        device = table_device(run.profile) or find_hardware(DEFAULT_HARDWARE)
    except InputError as error:
        run.notes.append(f"Nothing is predicted beside this run: {error}")
        return
    case = Case(run.name, recipe, device, [run.profile, *run.answers])
    if simulate:
        quiet_libraries()
    complete(case, ("napkin", "simulated") if simulate else ("napkin",))
    run.answers = case.profiles[1:]
    if run.profile.hardware.kind != "cpu":
        _add_changes(run, recipe, device)
    run.notes += case.notes
    if run.profile.hardware.kind == "cpu":
        run.notes.append("It ran on a CPU. What is predicted beside it is for a GPU:")
        run.notes += [
            f"{answer.source}, for the {answer.hardware.name} ({answer.provenance.get('calibration')})."
            for answer in run.answers
        ]
    if not simulate and not case.has("simulated"):
        run.notes.append("There is no simulated answer: give its profile too, or --simulate to make one.")


def _add_changes(run: ReportRun, recipe: Recipe, device: Hardware) -> None:
    """What would save memory by napkin's arithmetic, the most first; nothing for a model unknown to it."""
    from harness.architecture import load_shape
    from harness.fit import by_arithmetic, suggestions
    from harness.units import in_gib

    try:
        run.shape = load_shape(recipe.model)
        changes = suggestions(recipe, device.memory_bytes, by_arithmetic(device, run.shape))
    except InputError:
        return
    for change in sorted(changes, key=lambda change: -change.saved_bytes):
        other = "" if change.same_result else ", another training"
        time = f"time a token × {change.slowdown:.2f}"
        run.changes.append(f"{change.overrides} ({in_gib(change.saved_bytes)} less, {time}{other})")
