"""`harness mcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  harness mcp profiles/runs

  harness mcp runs recipes-of-mine checkpoints

A program that speaks the Model Context Protocol starts it: see the guide for its configuration.
"""


def mcp(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="What may be read: runs, profiles, snapshots, recipes, models. Default: nothing but what "
            "harness brings.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer questions of programs by the Model Context Protocol, on stdin and stdout. Reads these folders
    alone, writes nothing, reaches no network."""
    from harness.mcp import serve

    serve(folders or [])
