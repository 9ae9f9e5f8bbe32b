"""`harness napkin`, `fit`, `hardware`, `shard`: the commands that do arithmetic and import no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import InputError, printable

if TYPE_CHECKING:
    from harness.fit import Fit
    from harness.hardware import Hardware
    from harness.napkin_memory import Memory

OUT_OF_MEMORY = 3
GIB = 2**30

RecipeName = Annotated[str, typer.Argument(help="A name in recipes/, or the path of a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]... [hardware=NAME]",
        help="Fields to change, e.g. seq_len=4096, and the GPU (`harness hardware` lists them).",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]

NAPKIN_EXAMPLES = """
Examples:

  harness napkin llama-3.1-8b-lora

  harness napkin mistral-7b-qlora micro_batch_size=4 hardware=rtx-4090 --json
"""
FIT_EXAMPLES = """
Examples:

  harness fit mistral-7b-qlora --memory 16GiB

  harness fit llama-3.1-8b-lora seq_len=8192 --hardware rtx-4090

  harness fit llama-3.1-8b-lora --hardware rtx-4090 --exact --field seq_len
"""
HARDWARE_EXAMPLES = """
Examples:

  harness hardware llama-3.1-8b-lora --price h200=3.5 --price l4=0.7

  harness hardware llama-3.1-8b-lora --prices prices.yaml
"""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(epilog=NAPKIN_EXAMPLES)(napkin)
    app.command(epilog=FIT_EXAMPLES)(fit)
    app.command(epilog=HARDWARE_EXAMPLES)(hardware)
    app.command()(shard)


def napkin(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Derive memory and time line by line, each line checkable by hand, in milliseconds."""
    name, memory = _estimate(recipe, overrides or [])
    if as_json:
        from harness.napkin import profile

        print(profile(memory).to_json())
        return
    from harness.napkin_text import render

    print(printable(render(name, memory)), end="")


def fit(
    recipe: RecipeName,
    overrides: Overrides = None,
    memory: Annotated[
        str | None, typer.Option(help="A size such as 16GiB or 24GB, for no device in particular.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--hardware", help="A device of the table; the same as hardware=NAME.")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Fraction of memory left to the allocator's fragmentation.")
    ] = 0.05,
    exact: Annotated[
        bool, typer.Option("--exact", help="Simulate instead of estimating: no margin, about a minute.")
    ] = False,
    field: Annotated[
        str, typer.Option(help="With --exact: micro_batch_size, or seq_len (in steps of 64).")
    ] = "micro_batch_size",
    as_json: AsJson = False,
) -> None:
    """Find the largest micro batch and sequence that fit, or what to change when nothing does."""
    from harness.fit import fit as find_fit
    from harness.fit import parse_bytes, with_memory
    from harness.recipe_file import load_recipe

    given = [f"hardware={device}"] if device is not None else []
    chosen, changes = split_hardware([*(overrides or []), *given])
    name, loaded = load_recipe(recipe, changes)
    where = chosen.datasheet.title
    if memory is not None:
        chosen, where = with_memory(chosen, parse_bytes(memory)), memory
    if exact:
        from harness.cli_simulate import fit_by_simulation

        return fit_by_simulation(name, loaded, chosen, where, field, as_json)
    found = find_fit(loaded, chosen, margin=margin)
    if as_json:
        print(json.dumps(_fit_document(name, where, found), indent=1))
    else:
        print(printable("\n".join(_fit_lines(name, where, loaded, found))))
    if not found.micro_batch_size and not found.seq_len:
        raise typer.Exit(OUT_OF_MEMORY)


def _fit_lines(name: str, where: str, recipe: Any, found: Fit) -> Iterator[str]:
    limit, needed = found.limit_bytes / GIB, found.required_bytes / GIB
    rows, seq_len = recipe.micro_batch_size, recipe.seq_len
    yield f"{name} needs {needed:.2f} GiB at micro_batch_size {rows} and seq_len {seq_len}."
    yield f"{where} has {limit:.2f} GiB when a margin is left to the allocator's fragmentation."
    yield f"  largest micro_batch_size at seq_len {seq_len}: {found.micro_batch_size or 'none fits'}"
    yield f"  largest seq_len at micro_batch_size {rows}: {found.seq_len or 'none fits'}"
    if found.micro_batch_size or found.seq_len:
        yield "  these are estimates to start from; --exact simulates the allocator and leaves no margin"
    if found.required_bytes <= found.limit_bytes:
        return
    yield "It does not fit. Single changes that lower what it needs, the cheapest first:"
    yield f"  {'change':<66} {'saves GiB':>9} {'time a token':>13}  fits"
    for same in (True, False):
        group = [change for change in found.changes if change.same_result == same]
        if group:
            yield "  the same weights, trained to the same values:" if same else "  training something else:"
        for change in group:
            numbers = f"{change.saved_bytes / GIB:9.2f} {'× ' + format(change.slowdown, '.2f'):>13}"
            yield f"    {change.overrides:<64} {numbers}  {'yes' if change.fits else 'no'}"
    yield f"Together, until it fits: {found.together}" if found.together else "No combination of them fits."


def _fit_document(name: str, where: str, found: Fit) -> dict[str, Any]:
    return {
        "recipe": name,
        "memory": where,
        "limit_bytes": found.limit_bytes,
        "required_bytes": found.required_bytes,
        "largest_micro_batch_size": found.micro_batch_size,
        "largest_seq_len": found.seq_len,
        "together": found.together,
        "changes": [
            {
                "fields": change.fields,
                "saved_bytes": change.saved_bytes,
                "time_per_token_factor": change.slowdown,
                "fits": change.fits,
                "same_result": change.same_result,
            }
            for change in found.changes
        ],
    }


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
    from harness.hardware import hardware_names, read_prices
    from harness.hardware_choice import compare_hardware, render_choice, render_table
    from harness.recipe_file import load_recipe

    if recipe is None:
        if as_json or prices or price:
            raise InputError("--json, --price and --prices are for a recipe. Give its name.")
        print(render_table(), end="")
        return
    for text in overrides or []:
        if text.partition("=")[0] in hardware_names():
            raise InputError(f"{text} is no field. Write --price {text}, with a --price for every device.")
    name, loaded = load_recipe(recipe, overrides or [])
    offers = compare_hardware(loaded, read_prices(prices, price or []))
    if as_json:
        print(json.dumps([offer.document() for offer in offers], indent=1))
    else:
        print(printable(render_choice(name, offers)), end="")


def shard(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 8,
    group: Annotated[int, typer.Option(help="GPUs with fast links to each other (hybrid sharding).")] = 8,
    as_json: AsJson = False,
) -> None:
    """Divide the step among GPUs: memory and communication of each, under DDP, ZeRO, FSDP and others."""
    from dataclasses import asdict

    from harness.shard import shard as divide

    name, memory = _estimate(recipe, overrides or [])
    rows = divide(memory, gpus, group)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    sizes = memory.sizes
    print(f"{printable(name)} on {gpus} × {sizes.hardware.datasheet.title}: per GPU, one optimizer step")
    print(
        f"  one GPU: parameters {sizes.parameter_bytes / GIB:.2f}, gradients "
        f"{sizes.gradient_bytes / GIB:.2f}, optimizer {sizes.device_state / GIB:.2f}, "
        f"peak {memory.peak.total_bytes / GIB:.2f} GiB\n"
    )
    columns = f"{'params':>8} {'grads':>8} {'optim.':>8} {'peak GiB':>9} {'sent GiB':>9} {'link ms':>8}"
    print(f"  {'strategy':<17} {columns} {'shows ms':>9}  overlap")
    for row in rows:
        states = (row.states.parameters, row.states.gradients, row.states.optimizer)
        print(
            f"  {row.strategy:<17} "
            + " ".join(f"{size / GIB:8.3f}" for size in states)
            + f" {row.peak_bytes / GIB:9.2f} {row.sent_bytes / GIB:9.3f} {row.link_s * 1e3:8.1f} "
            f"{row.exposed_s * 1e3:9.1f}  {row.overlap}"
        )


def _estimate(recipe: str, overrides: Sequence[str]) -> tuple[str, Memory]:
    from harness.napkin import estimate
    from harness.recipe_file import load_recipe

    chosen, changes = split_hardware(overrides)
    name, loaded = load_recipe(recipe, changes)
    return name, estimate(loaded, chosen)


def split_hardware(overrides: Sequence[str]) -> tuple[Hardware, list[str]]:
    """The device of `hardware=NAME`, or the default one, and the other overrides. Raises InputError."""
    from harness.hardware import DEFAULT_HARDWARE, find_hardware

    names = [text.partition("=")[2].strip() for text in overrides if text.startswith("hardware=")]
    if len(names) > 1:
        raise InputError(f"hardware is given twice: {' and '.join(names)}. Keep one.")
    rest = [text for text in overrides if not text.startswith("hardware=")]
    return find_hardware(names[0] if names else DEFAULT_HARDWARE), rest
