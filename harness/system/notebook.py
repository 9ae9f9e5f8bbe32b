"""HTML that an object shows in a notebook: a title, small tables and sentences, all text escaped."""

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]
"""The rows of a table. The first row is the heading; the first column says what a row is about, and the
others hold numbers."""
LONGEST_TEXT = 500
"""Characters of a cell or a sentence that are shown."""
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
    aligned = [("right" if number else "left", text) for number, text in enumerate(cells)]
    row = (f'<{tag} style="text-align: {side}">{_text(text)}</{tag}>' for side, text in aligned)
    return f"<tr>{''.join(row)}</tr>"
