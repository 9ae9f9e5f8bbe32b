"""A terminal that shows text from files without obeying it, with progress bars and tables."""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Column, Table
from rich.text import Text

from harness.cli.terminal.lines import columns_here, wrapped
from harness.errors import printable


def say(people: Console, line: str, *, whole: bool = False) -> None:
    """Print a line, broken at spaces where it is wider than the terminal, unless it is to stay `whole`."""
    columns = None if whole else columns_here(terminal=people.is_terminal)
    for part in wrapped(line, columns):
        people.print(part, markup=False, highlight=False, soft_wrap=True)


class Terminal(Console):
    """A console that shows text from files as it is: no escape sequence, markup or emoji code has an effect.

    rich turns every string that it prints, also in a table, into text by `render_str`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See rich.console.Console."""
        return super().render_str(printable(text), **options)


class Bar:
    """A progress bar for `total` pieces of work on a terminal, shown inside a `with`; no bar elsewhere."""

    def __init__(
        self, console: Console, total: int, description: str, *columns: ProgressColumn, **fields: Any
    ) -> None:
        """`fields` are the first values of the fields that the columns show."""
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(description, total=total, **fields)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_table(console: Console, table: Table) -> None:
    """Print the table without cutting any number off. Columns that do not fit follow in a table below, whose
    first column is the same."""
    for column in table.columns:
        if column.no_wrap:  # rich measures as if its words could be on lines of their own
            column.min_width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    _fold_words(console, table)
    first, *rest = table.columns
    while True:
        shown = rest[:]
        while len(shown) > 1 and _width(console, table, [first, *shown]) > console.width:
            shown.pop()
        table.columns = [first, *shown]
        least = _width(console, table, table.columns)
        table.width = max(least, min(console.width, _width(console, table, table.columns, widest=True)))
        console.print(table, crop=False)
        rest = rest[len(shown) :]
        if not rest:
            return
        table.title = None


def _fold_words(console: Console, table: Table) -> None:
    """Where the table is too wide by a word that may be broken, such as a module's path, break it."""
    over = _width(console, table, table.columns) - console.width
    for n, column in enumerate(table.columns):
        longest = max((cell_len(word) for cell in column.cells for word in str(cell).split()), default=0)
        if over > 0 and not column.no_wrap and longest - over >= NARROWEST:
            cells = [_broken(str(cell), longest - over) for cell in column.cells]
            table.columns[n] = replace(column, max_width=longest - over, _cells=cells)
            return


def _broken(cell: str, width: int) -> str:
    """The cell in lines of at most `width` characters, each of which ends behind a space, or behind a
    character that ends a part of a path or of a list, as long as its parts are short enough."""
    lines = [""]
    for part in _PARTS.findall(cell):
        if cell_len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines if line)


_PARTS = re.compile(r"[^\s,/.]*(?:[,/.]+|\s+|$)")
"""A part of a path or of a list, with the characters that end it."""
NARROWEST = 40
"""Characters of a column whose words are broken: shorter words are none that anybody wants to see broken."""


def _width(console: Console, table: Table, columns: list[Column], *, widest: bool = False) -> int:
    """The least width of the table with these columns; with `widest` that at which no cell is folded."""
    table.columns, table.width = columns, None
    measured = console.measure(table, options=console.options.update(max_width=WIDEST))
    return measured.maximum if widest else measured.minimum


WIDEST = 1000
"""The width at which tables are measured, in characters, which is more than any of them needs."""


def rows_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Container[int] = (0,),
    wraps: Container[int] = (),
    padding: int = 1,
    bold: str | None = None,
) -> Table:
    """A table of text. Its columns are aligned to the right, except those in `left`; cells of the columns in
    `wraps` may be broken into lines; the row that begins with `bold` is bold.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    for n, heading in enumerate(columns):
        justify = "left" if n in left else "right"
        table.add_column(heading, justify=justify, no_wrap=n not in wraps, overflow="fold")
    for row in rows:
        table.add_row(*row, style="bold" if bold in row[:1] else "")
    return table
