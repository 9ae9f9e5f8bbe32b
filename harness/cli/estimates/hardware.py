"""`harness hardware`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import AsJson
from harness.cli.terminal.lines import tell
from harness.errors import InputError, printable

EXAMPLES = """
Examples:

  harness hardware llama-3.1-8b-lora --price h200=3.5 --price l4=0.7

  harness hardware llama-3.1-8b-lora --prices prices.yaml
"""


def hardware(
    recipe: Annotated[
        str | None,
        typer.Argument(help="As for the others. Without one: the table itself.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Fields to change.", show_default=False),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="YAML file of `name: price per hour` lines.", show_default=False)
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="name=price per hour; may be given again.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try every device of the table: fits or not, speed, and with prices the cost of a million tokens."""
    from harness.data import check_data
    from harness.fit import compare_hardware, render_choice, render_table
    from harness.hardware import hardware_names, read_prices
    from harness.recipe import load_recipe
    from harness.system import quiet_libraries, stdout_kept_for_json

    if recipe is None:
        if as_json or prices or price:
            raise InputError("--json, --price and --prices are for a recipe. Give its name.")
        tell(render_table())
        return
    for text in overrides or []:
        if text.partition("=")[0] in hardware_names():
            raise InputError(f"{text} is no field. Write --price {text}, with a --price for every device.")
    name, loaded = load_recipe(recipe, overrides or [])
    check_data(loaded)
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        given = read_prices(prices, price or [])
        offers = compare_hardware(loaded, given, lambda line: print(printable(line), file=sys.stderr))
    if as_json:
        print(json.dumps([offer.document() for offer in offers], indent=1))
    else:
        tell(render_choice(name, offers))
