"""What the programs here have in common: a command line, and a table of JSON that grows row by row."""

import argparse
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.system import write_whole

Row = dict[str, Any]


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m module`, whose help is the module's docstring `doc`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def versions_of(libraries: Sequence[str]) -> dict[str, str]:
    """The installed version of each, whatever the build."""
    return {name: version(name).partition("+")[0] for name in libraries}


class GrowingTable:
    """The rows of a JSON file, which is written anew after each row, so that a run that was cut short goes
    on. Rows that the file has already stay if they were made under the same circumstances.
    """

    def __init__(
        self,
        path: Path | None,
        head: dict[str, Any],
        key: Callable[[Row], Any],
        *,
        same: Sequence[str] = ("versions",),
        order: Callable[[Row], Any] | None = None,
    ) -> None:
        """`path`: None writes nothing. `head`: what stands before the rows; of it, the fields `same` are the
        circumstances. `key`: what a row is of. `order`: by what rows are sorted; None: as they come."""
        self._path, self._head, self._key, self._order = path, head, key, order
        self.rows: dict[Any, Row] = {}
        """Each row by its key."""
        if path is not None and path.exists():
            before = json.loads(path.read_bytes())
            if all(before[name] == head[name] for name in same):
                self.rows = {key(row): row for row in before["rows"]}

    def add(self, row: Row) -> None:
        """Put the row into the table, in the place of one with its key, and write the file."""
        self.rows[self._key(row)] = row
        if self._path is not None:
            rows = sorted(self.rows.values(), key=self._order) if self._order else [*self.rows.values()]
            write_whole(self._path, json.dumps(self._head | {"rows": rows}, indent=1) + "\n")
