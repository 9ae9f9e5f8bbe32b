"""The table of a sweep, in the terminal."""

from __future__ import annotations

from rich.console import Console

from harness.cli.terminal.terminal import plain_table, print_table, say
from harness.sweep import Sweep, table_of


def print_sweep(console: Console, sweep: Sweep) -> None:
    """The table, the reasons under it, and what it says."""
    table = table_of(sweep, with_reasons=False)
    shown = [n for n, name in enumerate(table.columns) if console.width >= 100 or name != "peak in"]
    printed = plain_table(0 if console.width < 90 else 1)
    for n in shown:
        printed.add_column(table.columns[n], justify="right" if n else "left", no_wrap=n > 0)
    for row in table.rows:
        printed.add_row(*(row[n].shown for n in shown))
    print_table(console, printed)
    for cell in sweep.cells:
        if cell.status != "ok":
            say(console, f"{cell.label}: {cell.reason}")
    for sentence in sweep.answers:
        say(console, sentence)
