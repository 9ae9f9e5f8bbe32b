"""The comparison of the answers, for reading in a terminal. Imports no torch."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.answers import SOURCES, Comparison, Row, unexplained_lines
from harness.cli.terminal.terminal import print_table, say
from harness.units import in_gib, in_ms


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the rows of a comparison by place, then what is unexplained and where, then the notes."""
    shown = [source for source in SOURCES if source in (*comparison.predictions, comparison.reference)]
    table = Table(
        title=f"{comparison.name} on {comparison.hardware}; reference: {comparison.reference}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    for source in shown:
        table.add_column(source, justify="right", no_wrap=True)
    for source in comparison.predictions:
        table.add_column(f"{source} / ref.", justify="right", no_wrap=True)
    place = ""
    for row in comparison.rows:
        if row.place != place:
            place = row.place
            table.add_row(place, style="bold")
        ratios = (row.ratio(source) for source in comparison.predictions)
        table.add_row(
            f"  {row.name}",
            *(_shown(row.values.get(source), row) for source in shown),
            *("-" if ratio is None else f"{ratio:.4f}" for ratio in ratios),
        )
    print_table(console, table)
    for line in (*unexplained_lines(comparison), *(f"note: {note}" for note in comparison.notes)):
        say(console, line)


def print_summary(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print a line for each recipe: the reference's peak, and the ratio of each prediction to it."""
    for comparison in comparisons:
        peak = comparison.peak()
        ratios = ", ".join(
            f"{source} {'no peak' if (ratio := peak.ratio(source)) is None else f'{ratio:.4f}'}"
            for source in comparison.predictions
        )
        reference = in_gib(peak.values.get(comparison.reference))
        line = f"{comparison.name} on {comparison.hardware}: {comparison.reference} {reference}; {ratios}"
        say(console, line)


def _shown(value: float | None, row: Row) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        return in_gib(value)
    return in_ms(value) if row.unit == "s" else f"{value:.4g}"
