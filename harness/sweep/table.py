"""The table of a sweep: for the terminal, as CSV and as Markdown. Imports no torch."""

import csv
import io

from harness.report import Cell, Table, escape_markdown, markdown_of, no_formula
from harness.step_profile import CATEGORIES
from harness.sweep.document import Sweep
from harness.sweep.plan import spelled

ENDED = {"ok": "", "out_of_memory": "out of memory", "refused": "refused", "failed": "failed"}
"""The words for how a cell ended, by its status."""


def table_of(sweep: Sweep, *, with_reasons: bool = True) -> Table:
    """A row for every cell. Columns of which nothing is known are left out."""
    rows = [
        [
            Cell(cell.label),
            Cell(cell.peak_allocated_bytes, "bytes"),
            Cell(cell.peak_reserved_bytes, "bytes"),
            Cell(cell.peak_phase),
            Cell(cell.step_s, "s"),
            Cell(cell.step_from_s, "s"),
            Cell(cell.step_to_s, "s"),
            Cell(None if cell.tokens_per_s is None else round(cell.tokens_per_s), "number"),
            Cell(cell.mfu, "share"),
            Cell(cell.bound),
            Cell((cell.reason if with_reasons else None) or ENDED[cell.status]),
        ]
        for cell in sweep.cells
    ]
    columns = ["cell", "allocated", "reserved", "peak in", "step", "from", "to"]
    columns += ["tokens/s", "MFU", "bound", "ended"]
    known = [n for n in range(len(columns)) if any(row[n].value not in (None, "") for row in rows)]
    return Table("Cells", [columns[n] for n in known], [[row[n] for n in known] for row in rows])


def as_csv(sweep: Sweep) -> str:
    """One line a cell, bytes and seconds unrounded; what is not known is empty."""
    text = io.StringIO()
    numbers = ["peak_allocated_bytes", "peak_reserved_bytes", "peak_phase", "step_s", "tokens_per_s", "mfu"]
    parts = [f"{category}_bytes" for category in CATEGORIES]
    writer = csv.writer(text, lineterminator="\n")
    ends = ["step_from_s", "step_to_s"]
    writer.writerow([*sweep.axes, "status", "reason", *numbers, "bound", *parts, "seconds", *ends])
    for cell in sweep.cells:
        values = (cell.values[name] for name in sweep.axes)
        others = [
            cell.status,
            cell.reason,
            *(getattr(cell, name) for name in numbers),
            cell.bound,
            *(cell.at_peak and getattr(cell.at_peak, name) for name in parts),
            cell.seconds,
            *(getattr(cell, name) for name in ends),
        ]
        writer.writerow(
            [
                *(no_formula(spelled(v)) if isinstance(v, str | list) else spelled(v) for v in values),
                *(no_formula(v) if isinstance(v, str) else v for v in others),
            ]
        )
    return text.getvalue()


def as_markdown(sweep: Sweep) -> str:
    """The table and the sweep's answers, for GitHub."""
    answers = "".join(f"\n{escape_markdown(sentence)}\n" for sentence in sweep.answers)
    return markdown_of(table_of(sweep)) + answers
