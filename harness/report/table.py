"""Tables of a report: the same rows for the page, for GitHub's Markdown and for CSV. Imports no torch."""

import csv
import io
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.errors import printable
from harness.units import in_gib, in_ms

LONG = 40
"""A table with more rows is folded away on GitHub."""
Unit = Literal["text", "bytes", "s", "flops", "flop/s", "bytes/s", "flop/byte", "ratio", "share", "number"]


class Cell(NamedTuple):
    """A value in its base unit, and the unit. None is unknown."""

    value: str | int | float | None
    unit: Unit = "text"
    signed: bool = False
    """A difference: shown with its sign."""

    @property
    def shown(self) -> str:
        """For reading: GiB, ms and so on; a dash for unknown."""
        value, unit = self.value, self.unit
        if value is None:
            return "-"
        if isinstance(value, str) or unit == "text":
            return str(value)
        if self.signed:
            return f"{'+' if value > 0 else '-' if value else ''}{Cell(abs(value), unit).shown}"
        if unit == "bytes":
            return in_gib(round(value))
        if unit == "s":
            return in_ms(value) if value >= 1e-3 else f"{value * 1e6:,.1f} µs"
        if unit == "share":
            return f"{value:.1%}"
        if unit == "ratio":
            return f"{value:.4f}"
        if unit == "number":
            return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return _with_prefix(value, {"flops": "FLOP", "flop/s": "FLOP/s", "bytes/s": "B/s"}.get(unit, unit))


@dataclass
class Table:
    """Rows under headings. The first `keys` cells of a row name it."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    keys: int = 1
    notes: list[str] = field(default_factory=list[str])

    def numeric(self, column: int) -> bool:
        """Whether the column holds values and not names."""
        return any(row[column].unit != "text" for row in self.rows)


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] = ()
) -> str:
    """Lines of GitHub's Markdown, the columns `numbers` to the right. Cells stand as they are given."""
    rule = ["---:" if column in numbers else "---" for column in range(len(columns))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (columns, rule, *rows))


def markdown_of(table: Table) -> str:
    """The rows alone. Text from files is escaped: it can neither end a cell nor become HTML."""
    rows = ([escape_markdown(cell.shown) for cell in row] for row in table.rows)
    numbers = {column for column in range(len(table.columns)) if table.numeric(column)}
    return markdown_table([escape_markdown(name) for name in table.columns], rows, numbers)


def to_markdown(tables: Iterable[Table]) -> str:
    """GitHub's Markdown: the tables under their names, with their notes."""
    parts: list[str] = []
    for table in tables:
        body = markdown_of(table)
        if len(table.rows) > LONG:
            body = f"<details><summary>{len(table.rows)} rows</summary>\n\n{body}\n</details>\n"
        notes = "".join(f"\n{escape_markdown(note)}\n" for note in table.notes)
        parts.append(f"### {escape_markdown(table.name)}\n\n{body}{notes}")
    return "\n".join(parts)


def to_csv(tables: Iterable[Table]) -> str:
    """One value a line, in base units (bytes, s): table, row, column, value, unit. Unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("table", "row", "column", "value", "unit"))
    for table in tables:
        for row in table.rows:
            name = " / ".join(str(cell.value) for cell in row[: table.keys])
            for column, cell in zip(table.columns[table.keys :], row[table.keys :], strict=True):
                texts = map(no_formula, (table.name, name, column))
                value = no_formula(cell.value) if isinstance(cell.value, str) else cell.value
                writer.writerow((*texts, value, cell.unit))
    return text.getvalue()


def escape_markdown(text: str) -> str:
    """`text` as text on GitHub and in a terminal: no HTML, emphasis, link, mention, new cell or escape."""
    flat = printable(" ".join(text.split()))
    escaped = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!@])", r"\\\1", escaped)


def no_formula(text: str) -> str:
    """`text` as text in a spreadsheet and in a terminal: no formula, no escape sequence."""
    return f"'{printable(text)}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else printable(text)


def _with_prefix(value: float, unit: str) -> str:
    for power, prefix in (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"):
        if abs(value) >= power:
            return f"{value / power:,.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}"
