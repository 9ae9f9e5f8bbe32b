"""What an object shows of itself in a notebook: a title, small tables, sentences; all text escaped."""

from collections.abc import Iterator, Sequence
from html import escape

Rows = Sequence[Sequence[str]]
"""Of a table: the first row is its heading, the first column what a row is about, the others numbers."""


LONGEST_TEXT = 500
"""Characters of a cell or a sentence; the rest is left out."""
MOST_NOTES = 10


def notebook_html(title: str, tables: Sequence[Rows], notes: Sequence[str] = ()) -> str:
    """HTML for `_repr_html_`: no script, no style sheet, nothing from the network. Empty tables are left out.

    `notes` are sentences below the tables, of which the first MOST_NOTES are shown.
    """
    return "".join(
        (
            f"<p><b>{_text(title)}</b></p>",
            *(_table(rows) for rows in tables if len(rows) > 1),
            *(f"<p>{_text(note)}</p>" for note in notes[:MOST_NOTES]),
        )
    )


def _text(text: str) -> str:
    return escape(text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "...")


def _table(rows: Rows) -> str:
    heading, *body = rows
    lines = [_row("th", heading), *(_row("td", row) for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(_cells(tag, cells))}</tr>"


def _cells(tag: str, cells: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(cells):
        side = "right" if number else "left"
        yield f'<{tag} style="text-align: {side}">{_text(text)}</{tag}>'
