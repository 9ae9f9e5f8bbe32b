"""`harness serve` for people, and `harness mcp` for programs."""

from pathlib import Path
from typing import Annotated

import typer

MCP_EXAMPLES = """
Examples:
  harness mcp profiles/runs
  harness mcp runs recipes-of-mine checkpoints
A program that speaks the Model Context Protocol starts it: see the guide for its configuration.
"""


def serve(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="A folder of runs, profiles, snapshots and sweeps. Default: profiles, or else this folder.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8642,
) -> None:
    """Ask in the browser whether a recipe fits, and see a folder of runs. On 127.0.0.1 only."""
    from harness.serve import ADDRESS, server_of

    shown = folder or Path("profiles" if Path("profiles").is_dir() else ".")
    with server_of(shown, port) as server:
        address = f"http://{ADDRESS}:{server.server_address[1]}/"
        print(f"{address} asks, {address}runs shows {shown}; Ctrl-C ends it", flush=True)
        server.serve_forever()


def mcp(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="What may be read: runs, profiles, snapshots, recipes, models. Default: nothing but what "
            "harness brings.",
        ),
    ] = None,
) -> None:
    """Answer questions of programs by the Model Context Protocol, on stdin and stdout. Reads these folders
    alone, writes nothing, reaches no network."""
    from harness.mcp import serve

    serve(folders or [])
