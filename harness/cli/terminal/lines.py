"""Lines that fit the reader's columns, for the commands that must not wait for rich to be imported."""

import json
import os
import shutil
import sys
import textwrap
from typing import Any

from harness.errors import printable

NARROWEST = 40
"""The least columns to which lines are broken, in a narrower terminal too."""


def columns_here(*, terminal: bool) -> int | None:
    """The columns that a line may have: COLUMNS, or the terminal's; None where a file or a program reads."""
    if terminal or os.environ.get("COLUMNS", "").isdigit():
        return max(NARROWEST, shutil.get_terminal_size().columns)
    return None


def wrapped(line: str, columns: int | None, hanging: int = 2) -> list[str]:
    """The line broken at spaces into lines of at most `columns`, of which the second and further ones are
    indented by `hanging` more than the first. A word that is longer than a line (a path) stays whole.
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
    """Print `text` for people, without escape sequences that control a terminal, and with lines that fit."""
    file = sys.stderr if stderr else sys.stdout
    columns = columns_here(terminal=file.isatty())
    for line in printable(text).rstrip("\n").split("\n"):
        print("\n".join(wrapped(line, columns, hanging)), file=file)
