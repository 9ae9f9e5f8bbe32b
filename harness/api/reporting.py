"""`harness.report`: runs, profiles and snapshots are read, missing predictions are added to them, and the
page is made of both. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.answers import Case, complete, different_fields
from harness.api.arguments import checked
from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit import by_arithmetic, suggestions
from harness.hardware import DEFAULT_HARDWARE, Hardware, find_hardware, table_device
from harness.recipe import Recipe, check_recipe
from harness.step_profile import StepProfile
from harness.system import notebook_html, quiet_libraries, write_whole
from harness.units import in_gib

if TYPE_CHECKING:
    from harness.report import ReportRun, Section

Reported = str | os.PathLike[str] | StepProfile
"""A run folder, a profile.json, a memory snapshot, or a profile."""


@dataclass(frozen=True)
class Report:
    """The report about some runs, profiles and snapshots. A notebook shows the main sentences and numbers of
    each."""

    runs: Sequence[ReportRun]
    path: Path | None = None
    """The file that the page was written to; None where it was not."""

    @property
    def html(self) -> str:
        """The whole page, which opens offline. Raises MissingDependency without jinja2."""
        from harness.report import report_html

        return report_html(self.runs)

    @property
    def markdown(self) -> str:
        """The tables in GitHub's Markdown; empty for a snapshot without a recorded history."""
        from harness.report import report_tables, to_markdown

        return to_markdown(report_tables(self._sections()))

    def write(self, path: str | os.PathLike[str]) -> Report:
        """Write the page to `path`, whole or not at all. Raises InputError and MissingDependency."""
        write_whole(Path(path), self.html)
        return Report(self.runs, Path(path))

    def _sections(self) -> list[Section]:
        from harness.report import section_of

        return [section_of(run) for run in self.runs]

    def _repr_html_(self) -> str:
        shown = [
            notebook_html(
                section.name,
                [
                    [
                        ("snapshot" if section.run.profile is None else section.run.profile.source, ""),
                        *((name, value) for name, value, _ in section.tiles),
                    ]
                ],
                [*section.answer, *section.run.notes],
            )
            for section in self._sections()
        ]
        where = [] if self.path is None else [notebook_html(f"The whole page: {self.path}", [])]
        return "".join([*shown, *where])


@checked
def report(*about: Reported, out: str | os.PathLike[str] | None = None, simulate: bool = False) -> Report:
    """What fills the memory and when, and what takes the time, of one run or of several beside each other.

    `about`: run folders, profiles (their files, or what the other functions return) and memory snapshots.
    Profiles of one recipe are put side by side. Napkin is put beside every profile, and with
    `simulate` the simulated step too. `out`: the HTML file to write; None writes nothing. Returns the
    report. Raises InputError for what cannot be read or written, MissingDependency without jinja2.
    """
    if not about:
        raise InputError("there is nothing to report. Give a run folder, a profile or a memory snapshot.")
    made = Report(read_runs(about, simulate=simulate))
    return made if out is None else made.write(out)


def read_runs(
    about: Sequence[Reported], *, device: int | None = None, simulate: bool = False
) -> list[ReportRun]:
    """The runs that a report is about, each with the other answers about its recipe. `device` is the index of
    the one to show of a snapshot of several. Raises InputError for what cannot be read.
    """
    from harness.report import ReportRun, read_run

    read = [
        ReportRun(_name(item), item) if isinstance(item, StepProfile) else read_run(Path(item), device)
        for item in about
    ]
    places = [_name(item) if isinstance(item, StepProfile) else str(item) for item in about]
    runs = _together(read, places)
    for run in runs:
        _add_answers(run, simulate=simulate)
    return runs


def _name(profile: StepProfile) -> str:
    name = profile.provenance.get("recipe_name")
    return name if isinstance(name, str) and name else profile.source


def _together(runs: Sequence[ReportRun], places: Sequence[str]) -> list[ReportRun]:
    """The runs, where a profile without a history becomes an answer of a run about the same recipe. Runs of
    one name are named by their `places`, the paths that they were read from."""
    kept: list[ReportRun] = []
    for run in runs:
        same = next((earlier for earlier in kept if _is_answer_of(run, earlier)), None)
        if same is not None and run.profile is not None:
            same.answers.append(run.profile)
        else:
            kept.append(run)
    names = [run.name for run in runs]
    for run, place in zip(runs, places, strict=True):
        if names.count(run.name) > 1:
            run.name = place
    return kept


def _is_answer_of(run: ReportRun, earlier: ReportRun) -> bool:
    """Whether `run` is a profile alone, of the recipe of `earlier` and of a source that this lacks so far."""
    profile, its_profile = run.profile, earlier.profile
    if run.history is not None or profile is None or its_profile is None:
        return False
    if profile.recipe is None or its_profile.recipe is None:
        return False
    sources = [its_profile.source, *(answer.source for answer in earlier.answers)]
    return profile.source not in sources and not different_fields(profile.recipe, its_profile.recipe)


def _add_answers(run: ReportRun, *, simulate: bool) -> None:
    """Add the predictions that a run's profile lacks: napkin always, since it takes milliseconds, and the
    simulated answer with `simulate`. Notes say what cannot be predicted, and why."""
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
    """Add the changes that would save memory by napkin's arithmetic, the most first; none for a model that
    napkin does not know."""
    try:
        run.shape = load_shape(recipe.model)
        changes = suggestions(recipe, device.memory_bytes, by_arithmetic(device, run.shape))
    except InputError:
        return
    for change in sorted(changes, key=lambda change: -change.saved_bytes):
        result = "" if change.same_result else ", another training"
        time = f"time a token × {change.slowdown:.2f}"
        run.changes.append(f"{change.overrides} ({in_gib(change.saved_bytes)} less, {time}{result})")
