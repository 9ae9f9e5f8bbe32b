"""`harness fit`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.allocator import allocator_settings
from harness.cli.arguments import AsJson, OverridesAndHardware, RecipeName
from harness.cli.exit_status import OUT_OF_MEMORY
from harness.cli.terminal.terminal import say
from harness.errors import InputError, printable
from harness.hardware import split_hardware
from harness.units import GIB

if TYPE_CHECKING:
    from harness.fit import ExactFit, Fit
    from harness.hardware import Hardware
    from harness.recipe import Recipe

EXAMPLES = """
Examples:

  harness fit mistral-7b-qlora --memory 16GiB

  harness fit llama-3.1-8b-lora seq_len=8192 --hardware rtx-4090

  harness fit llama-3.1-8b-lora --hardware rtx-4090 --exact --field seq_len
"""


def fit(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
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
    from harness.recipe import load_recipe

    given = [f"hardware={device}"] if device is not None else []
    chosen, changes = split_hardware([*(overrides or []), *given])
    name, loaded = load_recipe(recipe, changes)
    where = chosen.datasheet.title
    if memory is not None:
        chosen, where = with_memory(chosen, parse_bytes(memory)), memory
    if exact:
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


def fit_by_simulation(
    name: str, recipe: Recipe, hardware: Hardware, where: str, field: str, as_json: bool
) -> None:
    """What `harness fit --exact` does: search, say what is tried, print the largest value that fits."""
    from harness.cli.terminal.terminal import Terminal
    from harness.system import quiet_libraries, stdout_kept_for_json

    if field not in ("micro_batch_size", "seq_len"):
        raise InputError(f"--field {field}: give micro_batch_size or seq_len.")
    log = Terminal(stderr=True)
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        from harness.fit import fit_exact

        settings = allocator_settings(os.environ)
        found = fit_exact(
            recipe,
            hardware,
            field,  # type: ignore[arg-type]
            settings=settings,
            told=lambda value, fits: say(log, f"{field} {value}: {'fits' if fits else 'does not fit'}"),
        )
    if as_json:
        print(json.dumps({"recipe": name, "memory": where, **found.as_json()}, indent=1))
    else:
        print(printable("\n".join(_exact_lines(name, where, found))))
    if found.value is None:
        raise typer.Exit(OUT_OF_MEMORY)


def _exact_lines(name: str, where: str, found: ExactFit) -> Iterator[str]:
    from harness.units import in_gib

    if found.value is None or found.profile is None:
        yield f"{name} on {where}: no {found.field} fits"
    else:
        memory = found.profile.memory
        peak, reserved = in_gib(memory.peak_allocated_bytes), in_gib(memory.peak_reserved_bytes)
        yield f"{name} on {where}: the largest {found.field} is {found.value}"
        yield f"  it allocates {peak} at most and reserves {reserved}"
    if found.limit is not None:
        yield f"  {found.next_value} is impossible: {found.limit}"
    elif found.next_profile is not None and found.next_profile.oom is not None:
        oom = found.next_profile.oom
        asked = in_gib(oom.requested_bytes)
        yield f"  {found.next_value} runs out of memory in {oom.phase}, asking for {asked}"
