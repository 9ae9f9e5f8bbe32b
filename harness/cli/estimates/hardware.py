"""`harness hardware`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import AsJson, asked_recipe
from harness.cli.terminal.lines import answer, tell
from harness.errors import InputError, printable
from harness.system import quiet_libraries, stdout_kept_for_json

EXAMPLES = """
Examples:
  harness hardware llama-3.1-8b-lora --price h200=3.5 --price l4=0.7
  harness hardware llama-3.1-8b-lora --prices prices.yaml
  harness hardware llama-3.1-8b-lora --best --price h100=2.5 --price rtx-4090=0.35
  harness hardware llama-3.1-8b-lora seq_len=700 --tokens 35M --price rtx-4090=0.35 --price h100=2.5
  harness hardware llama-3.1-8b-full-bf16 --gpus 1,2,4,8 --price h100=2.5 --price a100-40gb=1.3
"""


def hardware(
    recipe: Annotated[
        str | None, typer.Argument(help="As for the others. Without one: the table itself.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to change.")
    ] = None,
    prices: Annotated[Path | None, typer.Option(help="YAML file of `name: price per hour` lines.")] = None,
    price: Annotated[list[str] | None, typer.Option(help="name=price per hour; may be given again.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of cards, e.g. 1,2,4,8: the fewest that fit.")
    ] = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Each device with the micro batch and toggles with which it is the fastest, and so the "
            "cheapest a token: checkpointing or not, and what costs nothing.",
        ),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens to train on, as in 35M, padding included: hours and cost of all of them."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try every device of the table: fits or not, speed, and with prices the cost of a million tokens."""
    from harness.data import check_data
    from harness.fit import (
        compare_counts,
        compare_hardware,
        read_counts,
        read_tokens,
        render_choice,
        render_counts,
        render_table,
    )
    from harness.hardware import hardware_names, read_prices
    from harness.napkin import warnings_of

    if recipe is None:
        if as_json or prices or price or gpus or best or tokens:
            raise InputError(
                "--json, --price, --prices, --gpus, --best and --tokens are for a recipe. Give its name."
            )
        tell(render_table())
        return
    for text in overrides or []:
        if text.partition("=")[0] in hardware_names():
            raise InputError(f"{text} is no field. Write --price {text}, with a --price for every device.")
    if best and gpus is not None:
        raise InputError("--best simulates single cards, and --gpus counts them by arithmetic. Give one.")
    num_tokens = 0 if tokens is None else read_tokens(tokens, "--tokens")
    name, loaded = asked_recipe(recipe, overrides or [])
    check_data(loaded)
    printed: set[str] = set()

    def say(line: str) -> None:
        printed.add(line)
        print(printable(line), file=sys.stderr)

    with stdout_kept_for_json(as_json):
        quiet_libraries()
        given = read_prices(prices, price or [])
        if gpus is None:
            offers = compare_hardware(loaded, given, say, best=best)
            document = [offer.document(num_tokens) for offer in offers]
            text = render_choice(name, offers, loaded.unit, num_tokens)
        else:
            cards = compare_counts(loaded, read_counts(gpus), given, say)
            document = [counts.document(num_tokens) for counts in cards]
            text = render_counts(name, cards, num_tokens)
    answer(document, text, as_json=as_json)
    for warning in warnings_of(loaded):
        if f"warning: {warning}" not in printed:
            tell(f"warning: {warning}", stderr=as_json)
