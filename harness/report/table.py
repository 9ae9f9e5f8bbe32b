"""The tables of a report, whose rows are the same on the page, in GitHub's Markdown and in CSV. Imports no
torch.
"""

import csv
import io
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.errors import printable
from harness.units import in_gib, in_ms

LONG = 40
"""The most rows of a table that Markdown shows at once; a longer one is folded away."""
Unit = Literal["text", "bytes", "s", "flops", "flop/s", "bytes/s", "flop/byte", "ratio", "share", "number"]


class Cell(NamedTuple):
    """A value in its base unit (bytes, seconds, FLOPs), and the unit; None for an unknown value."""

    value: str | int | float | None
    unit: Unit = "text"
    signed: bool = False
    """Whether the value is a difference, which is shown with its sign."""

    @property
    def shown(self) -> str:
        """The value for reading, in GiB, ms and so on; a dash for an unknown one."""
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
    """Rows under headings."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    keys: int = 1
    """How many of a row's first cells name the row."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences below the table."""

    def numeric(self, column: int) -> bool:
        """Whether the column holds values and not names."""
        return any(row[column].unit != "text" for row in self.rows)


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] = ()
) -> str:
    """A table in GitHub's Markdown. The columns `numbers` are aligned to the right; nothing is escaped."""
    rule = ["---:" if column in numbers else "---" for column in range(len(columns))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (columns, rule, *rows))


def markdown_of(table: Table) -> str:
    """A table in GitHub's Markdown without its name and notes. Text is escaped, so that text from a file can
    neither end a cell nor become HTML."""
    rows = ([escape_markdown(cell.shown) for cell in row] for row in table.rows)
    numbers = {column for column in range(len(table.columns)) if table.numeric(column)}
    return markdown_table([escape_markdown(name) for name in table.columns], rows, numbers)


def to_markdown(tables: Iterable[Table]) -> str:
    """The tables in GitHub's Markdown, under their names and with their notes."""
    parts: list[str] = []
    for table in tables:
        body = markdown_of(table)
        if len(table.rows) > LONG:
            body = f"<details><summary>{len(table.rows)} rows</summary>\n\n{body}\n</details>\n"
        notes = "".join(f"\n{escape_markdown(note)}\n" for note in table.notes)
        parts.append(f"### {escape_markdown(table.name)}\n\n{body}{notes}")
    return "\n".join(parts)


def to_csv(tables: Iterable[Table]) -> str:
    """The tables as CSV with a line for each value: table, row, column, value in the base unit, unit. An
    unknown value is empty."""
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
    """Escape `text` so that GitHub and a terminal show it as it is: no HTML, emphasis, link, mention, new
    cell or escape sequence comes of it."""
    flat = printable(" ".join(text.split()))
    escaped = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!@])", r"\\\1", escaped)


def no_formula(text: str) -> str:
    """`text` so that a spreadsheet and a terminal show it as it is: no formula, no escape sequence."""
    return f"'{printable(text)}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else printable(text)


def _with_prefix(value: float, unit: str) -> str:
    """A number with its unit and a decimal prefix, as in 1.5 TFLOP."""
    for power, prefix in (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"):
        if abs(value) >= power:
            return f"{value / power:,.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}"
