"""`harness serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A folder of runs, profiles, snapshots and sweeps.")
    ] = Path("profiles"),
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8642,
) -> None:
    """Show a folder of runs in the browser: list, filter, compare, open reports. On 127.0.0.1 only."""
    from harness.serve import ADDRESS, server_of

    with server_of(folder, port) as server:
        print(f"http://{ADDRESS}:{server.server_address[1]}/ shows {folder}; Ctrl-C ends it", flush=True)
        server.serve_forever()
