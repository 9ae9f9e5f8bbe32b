"""`harness snapshot`: what can be done with the file of a memory history."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  harness snapshot to-json run/snapshot.pickle --out snapshot.json

  harness simulate mine --trace-diff snapshot.json
"""


app = typer.Typer(help="Convert a memory snapshot to a format that cannot run code.")


@app.callback()
def _of_a_snapshot() -> None:
    """Convert a memory snapshot to a format that cannot run code."""


@app.command("to-json", epilog=EXAMPLES)
def to_json(
    file: Annotated[Path, typer.Argument(help="A snapshot.pickle, of harness or of torch; from anyone.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: stdout.", show_default=False)
    ] = None,
) -> None:
    """Write a snapshot as JSON, which every command that reads a snapshot takes too.

    The pickle is read as plain data: nothing in it runs, whoever made it.
    """
    from harness.snapshot import read_snapshot, snapshot_to_json
    from harness.system import write_whole

    text = snapshot_to_json(read_snapshot(file))
    if out is None:
        sys.stdout.write(text)
    else:
        write_whole(out, text)
