"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.hardware import Hardware
    from harness.recipe import Recipe

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
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME",
        envvar="HARNESS_TRACK",
        help="Tell an experiment tracker too: tensorboard, wandb, mlflow, trackio, ... Several with commas.",
        show_default=False,
    ),
]


def asked_for(
    recipe: str, overrides: Sequence[str] | None, memory: str | None
) -> tuple[str, Recipe, Hardware]:
    """Name and recipe, its data looked at, and the device, as the arguments above say. Raises InputError."""
    from harness.data import check_data
    from harness.hardware import split_hardware
    from harness.recipe import load_recipe

    hardware, changes = split_hardware(overrides or [], memory)
    name, loaded = load_recipe(recipe, changes)
    check_data(loaded)
    return name, loaded, hardware
