"""The answers about a run's recipe side by side (napkin, simulated, emulated, measured), with what remains
unexplained.
"""

from dataclasses import dataclass
from typing import Any

from harness.answers import SOURCES, Comparison, compare, unexplained_lines
from harness.errors import InputError
from harness.report.run import ReportRun
from harness.report.table import Cell, Table
from harness.step_profile import CATEGORIES, StepProfile

UNEXPLAINED = "unexplained"


@dataclass
class Answers:
    """The comparison of the answers as a table, and the memory at their peaks as bars."""

    reference: str
    """The source that the others are compared with."""
    table: Table
    bars: dict[str, Any]
    """What the charts draw: `rows` are sources, and `parts` has the bytes of each row by category, and those
    that are unexplained."""


def answers_about(run: ReportRun) -> Answers | str | None:
    """The answers about the run's recipe; None where there is only one, and a sentence where they cannot be
    compared."""
    if run.profile is None or not run.answers:
        return None
    profiles = [run.profile, *run.answers]
    try:
        comparison = compare(profiles, run.name)
    except InputError as error:
        return f"The answers are not put side by side. {error}"
    return Answers(comparison.reference, _table(comparison), _bars(comparison, profiles))


def _table(comparison: Comparison) -> Table:
    shown = [source for source in SOURCES if source in (*comparison.predictions, comparison.reference)]
    columns = ["place", "quantity", *shown]
    for source in comparison.predictions:
        columns += [f"{source} / {comparison.reference}", f"{UNEXPLAINED} by {source}"]
    rows: list[list[Cell]] = []
    for row in comparison.rows:
        cells = [
            Cell(row.place),
            Cell(row.name),
            *(Cell(row.values.get(source), row.unit) for source in shown),
        ]
        for source in comparison.predictions:
            cells += [Cell(row.ratio(source), "ratio"), Cell(row.unexplained(source), row.unit)]
        rows.append(cells)
    notes = [*unexplained_lines(comparison), *comparison.notes]
    return Table("The answers side by side", columns, rows, keys=2, notes=notes)


def _bars(comparison: Comparison, profiles: list[StepProfile]) -> dict[str, Any]:
    by_source = {profile.source: profile for profile in profiles}
    sources = [source for source in SOURCES if source in by_source]
    parts: dict[str, list[float | None]] = {
        name: [by_source[source].memory.at_peak.by_category()[name] for source in sources]
        for name in CATEGORIES
    }
    parts[UNEXPLAINED] = [
        comparison.peak().unexplained(source) if source in comparison.predictions else 0 for source in sources
    ]
    return {"rows": sources, "reference": comparison.reference, "parts": parts}
