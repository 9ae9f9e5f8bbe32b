"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeName = Annotated[
    str, typer.Argument(help="A name in recipes/ (`harness recipes` lists them), or the path of a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Fields to change, e.g. seq_len=4096.", show_default=False),
]
OverridesAndHardware = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]... [hardware=NAME]",
        help="Fields to change, e.g. seq_len=4096, and the GPU (`harness hardware` lists them).",
        show_default=False,
    ),
]
MemorySize = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Memory of the device, e.g. 16GiB or 24GB, for a card of another size or none in particular.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
JsonOnStdout = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")
]
