"""The page of a sweep: its answers, a pair of curves for each field, its table. Imports no torch."""

from collections import Counter
from typing import Any

from harness.report import Cell, Table, render_page
from harness.step_profile import CATEGORIES
from harness.sweep.curves import SweptCurve
from harness.sweep.document import Sweep, SweptCell
from harness.sweep.plan import spelled
from harness.sweep.table import ENDED, table_of
from harness.units import in_gib


def sweep_html(sweep: Sweep, home: str | None = None) -> str:
    """One HTML file that opens from disk; `home` is where it was opened from.

    Raises MissingDependency without jinja2.
    """
    fields = list(dict.fromkeys(curve.field for curve in sweep.curves))
    figures = [_figure(sweep, field) for field in fields]
    base = [(name, value) for name, value in sweep.base.items()]
    tables = {
        "cells": table_of(sweep),
        "base": Table("Base recipe", ["field", "value"], [[Cell(n), Cell(spelled(v))] for n, v in base]),
        "provenance": _provenance(sweep),
    }
    return render_page(
        "sweep.html",
        title=f"{sweep.name}: {', '.join(fields)}",
        home=home,
        data={"figures": figures, "plane": (plane := _plane(sweep)), "categories": _categories(sweep)},
        scripts=("plane.js", "stacked.js", "sweep.js"),
        plane=plane,
        sweep=sweep,
        tiles=_tiles(sweep),
        figures=figures,
        tables=tables,
    )


def _plane(sweep: Sweep) -> dict[str, Any]:
    """What the scripts draw for memory against speed: the cells that have both; the others in words."""
    known = [cell for cell in sweep.cells if cell.status == "ok" and cell.peak_allocated_bytes]
    cells: list[dict[str, Any]] = [
        {
            "label": cell.label,
            "short": ", ".join(part.partition("=")[2] for part in cell.label.split(", ")),
            "base": cell.label == "base",
            "field": "base recipe" if cell.label == "base" else _what_changes(sweep, cell),
            "peak": cell.peak_allocated_bytes,
            "speed": cell.tokens_per_s,
        }
        for cell in known
        if cell.tokens_per_s
    ]
    out = [cell.label for cell in sweep.cells if cell.status == "out_of_memory"]
    words = (
        "Each cell by its peak of allocated memory and its tokens per second: up and to the left is better."
    )
    if any(cell["base"] for cell in cells):
        words += " Beside each: how much more memory than the base recipe, and how many times its speed."
    if out:
        words += f" Out of memory, so not in the picture: {'; '.join(out)}."
    best = [cell.label for cell in sweep.best_for_memory()]
    if best:
        words += " The line joins those than which none is faster with as little memory."
    capacities = sorted({cell.capacity_bytes for cell in sweep.cells if cell.capacity_bytes})
    return {"cells": cells, "out": out, "capacities": capacities, "words": words, "best": best}


def _categories(sweep: Sweep) -> dict[str, Any]:
    """What the scripts draw for each cell's peak by category, with the sum or how it ended behind the bar."""
    held = [cell.at_peak if cell.status == "ok" else None for cell in sweep.cells]
    return {
        "rows": [cell.label for cell in sweep.cells],
        "parts": {
            name.replace("_", " "): [at_peak and at_peak.by_category()[name] for at_peak in held]
            for name in CATEGORIES
        },
        "written": [
            in_gib(cell.peak_allocated_bytes) if cell.status == "ok" else ENDED[cell.status]
            for cell in sweep.cells
        ],
    }


def _what_changes(sweep: Sweep, cell: SweptCell) -> str:
    """The field in which a cell differs from the base; with a grid, the first axis and its value."""
    if not sweep.grid:
        return cell.label.partition("=")[0]
    field = next(iter(sweep.axes))
    return f"{field}={spelled(cell.values[field])}"


def _figure(sweep: Sweep, field: str) -> dict[str, Any]:
    """What the scripts draw for one field: a series for every curve."""
    curves = [curve for curve in sweep.curves if curve.field == field]
    return {
        "field": field,
        "numeric": all(curve.numeric for curve in curves),
        "answers": [curve.answer for curve in curves if curve.answer],
        "series": [_series(sweep, curve) for curve in curves],
    }


def _series(sweep: Sweep, curve: SweptCurve) -> dict[str, Any]:
    cells = [sweep.cells[place] for place in curve.cells]
    line = None
    if curve.line is not None and curve.line.good:
        line = [curve.line.constant_bytes, curve.line.per_token_bytes * curve.line.tokens_per_unit]
    return {
        "name": ", ".join(f"{name}={spelled(value)}" for name, value in curve.others.items()),
        "points": [_point(cell, curve.field) for cell in cells],
        "line": line,
        "capacity": next((c.capacity_bytes for c in cells if c.capacity_bytes is not None), None),
    }


def _point(cell: SweptCell, field: str) -> dict[str, Any]:
    went_well = cell.status == "ok"
    return {
        "value": cell.values[field],
        "text": spelled(cell.values[field]),
        "ended": ENDED[cell.status],
        "allocated": cell.peak_allocated_bytes if went_well else None,
        "reserved": cell.peak_reserved_bytes if went_well else None,
        "speed": cell.tokens_per_s if went_well else None,
    }


def _tiles(sweep: Sweep) -> list[tuple[str, str, str]]:
    """(title, value, note) of each tile at the top of the page."""
    ended = Counter(cell.status for cell in sweep.cells)
    others = [f"{ended[status]} {words}" for status, words in ENDED.items() if words and ended[status]]
    device = sweep.hardware or str(sweep.provenance.get("platform", ""))
    tiles = [
        ("Recipe", sweep.name, "every combination" if sweep.grid else "one field at a time"),
        ("Answer", sweep.kind, device),
        ("Cells", f"{ended['ok']} of {len(sweep.cells)}", ", ".join(others) or "all went well"),
    ]
    if not sweep.complete:
        tiles.append(("Interrupted", "not complete", "run the same command to go on"))
    return tiles


def _provenance(sweep: Sweep) -> Table:
    facts = dict(sweep.provenance)
    if isinstance(facts.get("versions"), dict):
        facts |= facts.pop("versions")
    rows = [[Cell(str(name)), Cell(str(value))] for name, value in facts.items()]
    return Table("What made these numbers", ["fact", "value"], rows)
