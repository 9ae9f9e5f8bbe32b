"""The comparison of the three answers, for reading in a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.console import in_gib, in_ms, print_table
from harness.validate import SOURCES, Comparison, Row


def print_comparison(console: Console, comparison: Comparison) -> None:
    """The rows of a comparison by place, then what is unexplained and where, then the notes."""
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
        table.add_column(f"{source} /", justify="right", no_wrap=True)
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
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_summary(console: Console, comparisons: Sequence[Comparison]) -> None:
    """One line a recipe: the reference's peak, and each prediction's over it."""
    for comparison in comparisons:
        peak = comparison.peak()
        ratios = ", ".join(
            f"{source} {'no peak' if (ratio := peak.ratio(source)) is None else f'{ratio:.4f}'}"
            for source in comparison.predictions
        )
        reference = in_gib(_bytes(peak.values.get(comparison.reference)))
        line = f"{comparison.name} on {comparison.hardware}: {comparison.reference} {reference}; {ratios}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def unexplained_lines(comparison: Comparison) -> Iterator[str]:
    """For each prediction the size of what is missing (negative: too much), and in which places it lies."""
    for source in comparison.predictions:
        total = comparison.peak().unexplained(source)
        parts = [f"{'unknown' if total is None else _signed(total)} of the peak"]
        by_category = comparison.unexplained_by_category(source)
        by_phase = comparison.unexplained_by_phase(source)
        for kind, found in ("category", by_category), ("phase", by_phase):
            largest_first = sorted(found.items(), key=lambda place: -abs(place[1]))
            if found:
                places = ", ".join(f"{place} {_signed(size)}" for place, size in largest_first)
                parts.append(f"by {kind}: {places}")
        yield f"unexplained, {comparison.reference} - {source}: {'; '.join(parts)}"


def _shown(value: float | None, row: Row) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        return in_gib(_bytes(value))
    return in_ms(value) if row.unit == "s" else f"{value:.4g}"


def _bytes(value: float | None) -> int | None:
    return None if value is None else int(value)


def _signed(size_bytes: float) -> str:
    text = in_gib(int(size_bytes))
    return text if size_bytes < 0 else f"+{text}"
