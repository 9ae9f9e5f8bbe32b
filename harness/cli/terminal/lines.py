"""Lines that fit the reader's columns. No rich: the commands that answer at once print with it."""

import json
import os
import shutil
import sys
import textwrap
from typing import Any

from harness.errors import printable

NARROWEST = 40
"""Columns: in a narrower terminal lines are as long as here."""


def columns_here(*, terminal: bool) -> int | None:
    """How wide a line may be: COLUMNS, or the terminal's width; None where a file or a program reads."""
    if terminal or os.environ.get("COLUMNS", "").isdigit():
        return max(NARROWEST, shutil.get_terminal_size().columns)
    return None


def wrapped(line: str, columns: int | None, hanging: int = 2) -> list[str]:
    """The line as lines of at most `columns`, broken at spaces; what follows is indented by
    `hanging` more than the first.

    A word longer than a line (a path) stays whole.
    """
    if columns is None or len(line) <= columns:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + hanging)
    return textwrap.wrap(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print the answer of a command: the document as JSON for programs, or `text` for people."""
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        tell(text)


def tell(text: str, hanging: int = 2, *, stderr: bool = False) -> None:
    """Print `text` for people: nothing in it can steer a terminal, and every line fits."""
    file = sys.stderr if stderr else sys.stdout
    columns = columns_here(terminal=file.isatty())
    for line in printable(text).rstrip("\n").split("\n"):
        print("\n".join(wrapped(line, columns, hanging)), file=file)
