"""The curves of a sweep as PNG pictures: what fills the memory at each value, and tokens per second.

Imports no torch.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import InputError
from harness.report import COLOURS, drawing, stacked
from harness.step_profile import CATEGORIES
from harness.sweep.curves import SweptCurve
from harness.sweep.document import Sweep, SweptCell
from harness.sweep.plan import spelled
from harness.sweep.table import ENDED
from harness.units import GIB, in_gib


def write_figures(sweep: Sweep, folder: Path) -> list[Path]:
    """Draw <field>.png for every swept field; with a grid, the first of its curves. Returns the files.

    Each file's `Description` is the `digest` of the sweep that it shows. Raises InputError when they cannot
    be written, MissingDependency without matplotlib.
    """
    figure_class = drawing()
    first = {curve.field: curve for curve in reversed(sweep.curves)}
    paths: list[Path] = []
    for field in sweep.axes:
        cells = [sweep.cells[place] for place in first[field].cells]
        figure = figure_class(figsize=(9, 1.4 + 0.42 * len(cells)), dpi=100, layout="constrained")
        memory, speed = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
        _draw_memory(memory, first[field], cells)
        _draw_speed(speed, cells)
        path = folder / f"{field}.png"
        try:
            figure.savefig(path, metadata={"Description": digest(sweep)})
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}.") from None
        paths.append(path)
    return paths


def digest(sweep: Sweep) -> str:
    """SHA-256 of sweep.json without the parts of a step's time, which no figure shows."""
    shown = sweep.model_dump_json(indent=1, exclude={"cells": {"__all__": {"step_parts_s"}}})
    return hashlib.sha256(f"{shown}\n".encode()).hexdigest()


def _draw_memory(axes: Any, curve: SweptCurve, cells: Sequence[SweptCell]) -> None:
    """Bytes at the peak, stacked by category."""
    values = [spelled(cell.values[curve.field]) for cell in cells]
    names = [value if len(value) <= 24 else f"{value[:23]}…" for value in values]
    at_peaks = [c.at_peak.by_category() if c.status == "ok" and c.at_peak else {} for c in cells]
    parts = {
        category.replace("_", " "): np.array([(at_peak.get(category) or 0) / GIB for at_peak in at_peaks])
        for category in CATEGORIES
    }
    ends = stacked(axes, range(len(cells)), parts, height=0.7)
    for n, cell in enumerate(cells):
        text = in_gib(cell.peak_allocated_bytes) if cell.status == "ok" else ENDED[cell.status]
        axes.annotate(text, (ends[n], n), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max([*ends, 1e-6]) * 1.25)
    axes.set_yticks(range(len(cells)), names)
    axes.set_ylabel(curve.field)
    axes.set_xlabel("GiB at the peak")
    axes.invert_yaxis()
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_speed(axes: Any, cells: Sequence[SweptCell]) -> None:
    speeds = [(cell.tokens_per_s or 0.0) if cell.status == "ok" else 0.0 for cell in cells]
    axes.barh(range(len(cells)), speeds, color=COLOURS[5], height=0.7)
    for n, speed in enumerate(speeds):
        text = f"{speed:,.0f}" if speed else "-"
        axes.annotate(text, (speed, n), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max([*speeds, 1e-6]) * 1.3)
    axes.set_xlabel("tokens/s")
