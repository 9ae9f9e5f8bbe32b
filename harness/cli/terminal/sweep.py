"""A sweep in the terminal: a line for each cell that is done, a bar with the time left, and the table."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from harness.cli.terminal.progress import left_in_words
from harness.cli.terminal.terminal import Bar, print_table, rows_table, say
from harness.sweep import Row, Sweep, table_of
from harness.units import in_gib


class SweepProgress(Bar):
    """Shows a sweep's progress. The time left is the mean time of the cells that this command ran, times the
    cells that are left; cells that an earlier command had done take no time."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("cells"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(console, total, "cells", *columns, TextColumn("{task.fields[left]}"), left="")
        self._total = total
        self._done = self._worked = 0
        self._begun = time.monotonic()

    def done(self, row: Row) -> None:
        """Show that a cell is done."""
        self._done += 1
        self._worked += not row.kept
        left = self._left()
        line = f"[{self._done}/{self._total}] {row.cell.label}: {in_a_line(row)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, left=left)
        elif left:
            line += f"; {left}"
        say(self._console, line)

    def _left(self) -> str:
        cells = self._total - self._done
        if not cells or not self._worked:
            return ""
        seconds = (time.monotonic() - self._begun) / self._worked * cells
        return left_in_words(seconds)


WIDE = ("peak in", "from", "to", "bound", "ended")
"""The columns that a terminal of 80 columns has no room for. The report and the CSV have them, and sentences
below the table say which cells did not end well."""


def in_a_line(row: Row) -> str:
    """The outcome of a cell in a few words."""
    profile = row.outcome.profile
    if profile is None or row.outcome.status != "ok":
        return row.outcome.reason or row.outcome.status
    words = [in_gib(profile.memory.peak_allocated_bytes)]
    if profile.step.tokens_per_s is not None:
        words.append(f"{profile.step.tokens_per_s:,.0f} tokens/s")
    if row.kept:
        words.append("done before")
    return ", ".join(words)


def print_sweep(console: Console, sweep: Sweep) -> None:
    """Print the table, the reasons of cells that did not end well, and the sweep's answers in sentences."""
    table = table_of(sweep, with_reasons=False)
    shown = [n for n, name in enumerate(table.columns) if console.width >= 100 or name not in WIDE]
    rows = [[row[n].shown for n in shown] for row in table.rows]
    padding = 0 if console.width < 90 else 1
    print_table(console, rows_table([table.columns[n] for n in shown], rows, wraps=(0,), padding=padding))
    for cell in sweep.cells:
        if cell.status != "ok":
            say(console, f"{cell.label}: {cell.reason}")
    for sentence in sweep.answers:
        say(console, sentence)
