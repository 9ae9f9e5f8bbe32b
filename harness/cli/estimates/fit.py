"""`harness fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from harness.allocator import allocator_settings
from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.exit_status import OUT_OF_MEMORY
from harness.cli.terminal.lines import answer
from harness.cli.terminal.terminal import Terminal, say
from harness.errors import InputError
from harness.recipe import Recipe
from harness.system import quiet_libraries, stdout_kept_for_json

if TYPE_CHECKING:
    from harness.hardware import Hardware

EXAMPLES = """
Examples:
  harness fit mistral-7b-qlora --memory 16GiB
  harness fit llama-3.1-8b-lora seq_len=8192 --hardware rtx-4090 --quick
  harness fit llama-3.1-8b-lora --hardware rtx-4090 --exact --field seq_len
  harness fit llama-3.1-8b-lora --hardware rtx-4090 --data chats.jsonl --tokenizer checkpoint
  harness fit llama-3.1-8b-full-bf16 --hardware a100-40gb --gpus 4 --quick
"""


def fit(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    memory: MemorySize = None,
    device: Annotated[
        str | None, typer.Option("--hardware", help="A device of the table; the same as hardware=NAME.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="On so many of them, divided as the recipe says, or by FSDP2.")
    ] = None,
    margin: Annotated[
        float,
        typer.Option(help="Fraction of memory that arithmetic leaves to the allocator's fragmentation."),
    ] = 0.05,
    quick: Annotated[
        bool, typer.Option("--quick", help="By arithmetic alone: estimates in a moment, not seen to fit.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Simulate one field alone (--field), and nothing else.")
    ] = False,
    field: Annotated[
        str, typer.Option(help="With --exact: micro_batch_size, or seq_len (in steps of 64).")
    ] = "micro_batch_size",
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples, a file or a data set's id: the worst batch of their lengths, and the chance to "
            "run out in an epoch."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="With --data: a checkpoint's folder or id. Default: the model's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest micro batch and sequence that a simulation sees to fit, or what to change if none."""
    if exact and quick:
        raise InputError("--exact simulates and --quick does not. Give one of them.")
    if tokenizer is not None and data is None:
        raise InputError("--tokenizer belongs to --data, whose texts it turns into tokens. Give both.")
    if data is not None and (exact or quick):
        raise InputError(
            f"--data searches by simulation itself. Leave --{'exact' if exact else 'quick'} out."
        )
    if exact and field not in ("micro_batch_size", "seq_len"):
        raise InputError(f"--field {field}: give micro_batch_size or seq_len.")
    given = [f"hardware={device}"] if device is not None else []
    given += ["data=synthetic"] if data is not None else []  # --data takes the place of the recipe's own
    name, loaded, chosen = asked_for(recipe, [*(overrides or []), *given], memory)
    where = chosen.datasheet.title if memory is None else memory
    if gpus is not None:
        from harness.fit import among, read_counts

        loaded = among(loaded, *read_counts(str(gpus)))
        where = f"{gpus} × {where}"
    question = _Question(name, loaded, chosen, where, partial(say, Terminal(stderr=True)))
    with stdout_kept_for_json(as_json):
        if not quick:
            quiet_libraries()
        if data is not None:
            document, lines, fits = _to_data(question, data, tokenizer)
        elif exact:
            document, lines, fits = _by_simulation(question, field)
        else:
            document, lines, fits = _confirmed(question, margin, quick)
    answer(document, "\n".join(lines), as_json=as_json)
    if not fits:
        raise typer.Exit(OUT_OF_MEMORY)


class _Question(NamedTuple):
    """What is asked about."""

    name: str
    recipe: Recipe
    hardware: Hardware
    where: str
    """What the recipe is to fit, in words: the device or the size of its memory."""
    progress: Callable[[str], None]
    """Called with a line for everything that is tried."""


Answered = tuple[dict[str, Any], Iterable[str], bool]
"""The answer as plain data and as lines, and whether any size fits."""


def _to_data(question: _Question, data: str, tokenizer: str | None) -> Answered:
    """The largest micro batches for the lengths of the examples in `data`, and the chance to run out."""
    from harness.architecture import load_shape
    from harness.data import example_lengths
    from harness.fit import fit_lengths, lengths_document, lengths_lines

    name, recipe, hardware, where, progress = question
    try:
        vocab_size = load_shape(recipe.model).vocab
    except InputError:  # arithmetic does not know the model, which may have a tokenizer all the same
        vocab_size = None
    lengths = example_lengths(recipe, data, vocab_size=vocab_size, tokenizer=tokenizer)
    found = fit_lengths(recipe, hardware, allocator_settings(os.environ), lengths, told=progress)
    about = name, where, data, recipe, found
    fits = any(batch.fits_up_to for batch in found.micro_batches)
    return lengths_document(*about), lengths_lines(*about), fits


def _by_simulation(question: _Question, field: str) -> Answered:
    """The largest value of one field that fits, by simulations alone."""
    from harness.fit import Simulations, exact_lines, fit_exact

    name, recipe, hardware, where, progress = question
    found = fit_exact(
        recipe,
        Simulations(hardware, allocator_settings(os.environ)),
        field,  # type: ignore[arg-type]
        told=lambda value, fits: progress(f"{field} {value}: {'fits' if fits else 'does not fit'}"),
    )
    document = {"recipe": name, "memory": where, **found.as_json()}
    return document, exact_lines(name, where, recipe, found), found.value is not None


def _confirmed(question: _Question, margin: float, quick: bool) -> Answered:
    """The largest sizes that fit, and changes, by arithmetic that simulations confirm unless `quick`."""
    from harness.fit import ConfirmedFit, fit, fit_confirmed, fit_document, fit_lines

    name, recipe, hardware, where, progress = question
    if quick:
        found = ConfirmedFit.by_arithmetic(fit(recipe, hardware, margin=margin))
    else:
        found = fit_confirmed(recipe, hardware, allocator_settings(os.environ), margin=margin, told=progress)
    lines = fit_lines(name, where, recipe, hardware, found)
    return fit_document(name, where, recipe, found), lines, found.fits_something
