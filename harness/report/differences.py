"""The tables of a report about several runs: what differs in their recipes, their bytes and their times."""

from collections.abc import Sequence
from typing import Any

from harness.answers import quantities
from harness.report.profile_tables import as_text
from harness.report.run import ReportRun
from harness.report.sections import Section
from harness.report.table import Cell, Table


def difference_tables(runs: Sequence[ReportRun]) -> list[Table]:
    """Two tables about the runs that have a profile: the recipe's fields that differ, and all quantities with
    their changes from the first run. None where fewer than two have a profile."""
    profiled = [(run.name, run.profile) for run in runs if run.profile is not None]
    if len(profiled) < 2:
        return []
    names = [name for name, _ in profiled]
    recipes = [profile.recipe or {"command": profile.subject} for _, profile in profiled]
    fields = list(dict.fromkeys(field for recipe in recipes for field in recipe))
    rows = [
        (Cell(field), *(Cell(as_text(recipe.get(field))) for recipe in recipes))
        for field in fields
        if any(recipe.get(field) != recipes[0].get(field) for recipe in recipes)
    ]
    devices = [profile.hardware.name for _, profile in profiled]
    if len(set(devices)) > 1:
        rows.append((Cell("(device)"), *map(Cell, devices)))
    different = Table("What differs in the recipes", ("field", *names), rows)
    if not rows:
        different.notes.append("The recipes are the same in every field.")
    return [different, _numbers(names, [quantities(profile) for _, profile in profiled])]


ORDER = (
    "summary",
    "memory",
    "groups",
    "kinds",
    "phases",
    "answers",
    "roofline",
    "segments",
    "modules",
    "recipe",
    "provenance",
)
"""The order of a section's tables, the ones that most readers look for first."""


def report_tables(sections: Sequence[Section]) -> list[Table]:
    """Every table of a report, for Markdown and CSV; of several runs each is named after its run."""
    several = len(sections) > 1
    tables = difference_tables([section.run for section in sections])
    for section in sections:
        for table in (section.tables[name] for name in ORDER if name in section.tables):
            name = f"{section.name}: {table.name}" if several else table.name
            tables.append(Table(name, table.columns, table.rows, table.keys, table.notes))
    return tables


def _numbers(names: Sequence[str], known: Sequence[dict[Any, float | None]]) -> Table:
    """The quantities of each run (as `quantities` has them), and their changes from the first run's."""
    columns = ["place", "quantity", names[0]]
    for name in names[1:]:
        columns += [name, "change", "in percent"]
    rows: list[list[Cell]] = []
    for key in known[0]:
        place, quantity, unit = key
        values = [found[key] for found in known]
        if all(value is None for value in values):
            continue
        first = values[0]
        cells = [Cell(place), Cell(quantity), Cell(first, unit)]
        for value in values[1:]:
            change = None if value is None or first is None else value - first
            cells += [
                Cell(value, unit),
                Cell(change, unit, signed=True),
                Cell(change / first if change is not None and first else None, "share", signed=True),
            ]
        rows.append(cells)
    return Table("What differs in bytes and times", columns, rows, keys=2)
