"""A terminal that shows what files say and obeys none of it; bars and tables on it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from harness.errors import printable


def say(people: Console, line: str) -> None:
    people.print(line, markup=False, highlight=False, soft_wrap=True)


WIDEST = 1000
"""Characters of a line; more than any table here needs."""


class Terminal(Console):
    """A console that shows what files say and obeys none of it: no escape sequence, markup or emoji code.

    rich turns every string that it prints, also in a table, into text by `render_str`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See rich.console.Console."""
        return super().render_str(printable(text), **options)


class Bar:
    """A bar on a terminal for `total` pieces of work, and no bar elsewhere; shown between enter and exit."""

    def __init__(
        self, console: Console, total: int, description: str, *columns: ProgressColumn, **fields: Any
    ) -> None:
        """`fields` are what the columns show at first, by the names they use."""
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
    """The table at its full width: in a narrow terminal its lines wrap, and no number is cut."""
    options = console.options.update(max_width=WIDEST)
    table.width = console.measure(table, options=options).maximum
    console.print(table, crop=False)


def plain_table(padding: int = 1) -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
