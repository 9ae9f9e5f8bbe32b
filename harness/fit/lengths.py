"""Whether a data set of rows of different lengths fits: its worst batch, the chance to run out, what helps.

A batch is padded to its longest row, so that memory depends on the longest row in it. The longest padded
length that fits is found by simulation (fit/exact.py), and which batches come is counted (fit/batching.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from harness.allocator import Settings
from harness.errors import InputError
from harness.fit.batching import (
    Padded,
    chance_in_an_epoch,
    grouped_padded_tokens,
    half_of_epochs_by,
    padded_tokens,
)
from harness.fit.exact import fit_exact
from harness.fit.simulations import Simulations
from harness.hardware import Hardware
from harness.recipe import Recipe
from harness.step_profile import StepProfile
from harness.units import duration, in_gib

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FACTORS = (0.5, 1, 2, 4)
"""Multiples of the recipe's micro_batch_size that are looked at, besides a micro batch of one row."""
ROW = "  {:<17} {:<12} {:<16} {:>8} {:>13} {:>7}"
"""The heading and each row of the ways to put rows into batches."""
GROUPED_SEED = 0
"""The shuffle of the epoch that is grouped by length."""


@dataclass(frozen=True)
class MicroBatch:
    """What happens with micro batches of so many rows, shuffled and padded to their longest row."""

    rows: int
    fits_up_to: int
    """The longest padded length that fits in a simulation, in tokens; 0 if none does."""
    peak_allocated_bytes: int | None
    """The peak of the worst micro batch; None if it does not fit."""
    longer_rows: int
    """How many rows of the data set are longer than what fits."""
    chance_in_an_epoch: float
    """The probability that an epoch runs out of memory."""
    half_of_epochs_by: int | None
    """The micro batch, counted from 1, by which half of all epochs have run out; None if they do not."""
    padding_share: float
    """The fraction of an epoch's tokens that is padding."""


@dataclass(frozen=True)
class Way:
    """One way to put the rows into micro batches of the recipe's micro_batch_size."""

    name: str
    runs_out: str
    """"no", or when it runs out of memory."""
    peak_allocated_bytes: int | None
    """The peak of the worst micro batch; None if it does not fit."""
    padding_share: float
    """The fraction of `tokens_an_epoch` that is padding."""
    tokens_an_epoch: float
    """The tokens that the model reads in an epoch, padding included."""
    micro_batches: int
    """How many there are in an epoch."""
    rows_cut: int
    """How many rows are cut off, or left out where rows are scored whole."""
    tokens_lost: int
    """The tokens of the data set that are thereby not read."""
    hours_an_epoch: float | None = None
    """The hours of all micro batches if each took as long as one of the mean length; None if the step does
    not fit, or its time is not known."""


@dataclass
class LengthsFit:
    """The answer for one data set. Lengths are in tokens, of rows cut off at the recipe's seq_len."""

    rows: int
    median: int
    longest: int
    tokens: int
    """The tokens of all rows in an epoch, without padding."""
    rows_cut: int
    """How many rows are longer than seq_len."""
    tokens_lost: int
    """The tokens beyond seq_len."""
    micro_batches: list[MicroBatch] = field(default_factory=list[MicroBatch])
    ways: list[Way] = field(default_factory=list[Way])
    notes: list[str] = field(default_factory=list[str])
    """The simulations' warnings, each once."""


def fit_lengths(
    recipe: Recipe,
    hardware: Hardware,
    settings: Settings,
    lengths: NDArray[np.int64],
    told: Callable[[str], None] = lambda line: None,
) -> LengthsFit:
    """What happens to `recipe` on `hardware` with rows of these lengths.

    `lengths` are in tokens, shape (number of rows,); the rows of one example (a pair's two answers) stand one
    after the other. `told` is called with a line about each simulation. Raises InputError for what cannot be
    simulated, and for fewer rows than a micro batch has.
    """
    import numpy as np

    examples = lengths.reshape(-1, recipe.rows // recipe.micro_batch_size)
    cut = _cut(recipe, examples, recipe.seq_len)
    if len(cut) < recipe.micro_batch_size:
        left = "" if len(cut) == len(examples) else f" within seq_len: {recipe.seq_len}"
        raise InputError(
            f"micro_batch_size: {recipe.micro_batch_size}, and the data has {len(cut)} examples{left}. "
            "Set a smaller one, or give more data."
        )
    recipe = recipe.model_copy(update={"data": "synthetic", "packing": False})
    simulations = Simulations(hardware, settings)
    found = LengthsFit(
        rows=len(cut),
        median=int(np.median(cut.max(axis=1))),
        longest=int(cut.max()),
        tokens=int(cut.sum()),
        rows_cut=_longer(examples, recipe.seq_len),
        tokens_lost=int(examples.sum() - cut.sum()),
    )
    if recipe.unpaired:
        found.notes.append(
            "Every prompt is also read with another's answer, without gradients: such a row may be longer "
            "than any that is counted here"
        )
    sizes = {1, *(int(recipe.micro_batch_size * factor) for factor in FACTORS)}
    for rows in sorted(size for size in sizes if 1 <= size <= len(cut)):
        batch, profile = _micro_batch(recipe, simulations, cut, rows, told)
        found.micro_batches.append(batch)
        found.notes += [warning for warning in profile.warnings if warning not in found.notes]
        if found.micro_batches[-1].fits_up_to == 0:
            break
    own_batch = next((b for b in found.micro_batches if b.rows == recipe.micro_batch_size), None)
    if own_batch is not None:
        ways = _ways(recipe, simulations, examples, own_batch)
        found.ways = [replace(way, hours_an_epoch=_hours(recipe, simulations, way)) for way in ways]
    return found


def _cut(recipe: Recipe, examples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """The lengths that a run has of rows of these lengths, shape (examples, rows): cut off at seq_len, or
    left out where rows are scored whole."""
    import numpy as np

    return examples[examples.max(axis=1) <= seq_len] if recipe.scores else np.minimum(examples, seq_len)


def _longer(examples: NDArray[np.int64], seq_len: int) -> int:
    """How many examples have a row of more than seq_len tokens."""
    return int((examples.max(axis=1) > seq_len).sum())


def _padded(examples: NDArray[np.int64], epoch: Padded) -> Padded:
    """The padding of an epoch of examples, from that of their longest rows, which all are padded to."""
    tokens = epoch.tokens * examples.shape[1]
    return Padded(tokens, 1 - int(examples.sum()) / tokens)


def _micro_batch(
    recipe: Recipe,
    simulations: Simulations,
    examples: NDArray[np.int64],
    rows: int,
    told: Callable[[str], None],
) -> tuple[MicroBatch, StepProfile]:
    """What happens with micro batches of `rows`, and the simulated profile of the worst of them."""
    lengths = examples.max(axis=1)
    sized = recipe.model_copy(update={"micro_batch_size": rows, "seq_len": int(lengths.max())})
    profile = simulations.profile(sized)
    peak = _peak(profile)
    told(f"{rows} x {sized.seq_len}: {'fits' if peak is not None else 'does not fit'}")
    longest = sized.seq_len
    if peak is None:
        search = fit_exact(
            sized,
            simulations,
            "seq_len",
            told=lambda value, fits: told(f"{rows} x {value}: {'fits' if fits else 'does not fit'}"),
        )
        longest = min(search.value or 0, sized.seq_len - 1)
    longer = int((lengths > longest).sum())
    batch = MicroBatch(
        rows=rows,
        fits_up_to=longest,
        peak_allocated_bytes=peak,
        longer_rows=longer,
        chance_in_an_epoch=chance_in_an_epoch(len(lengths), longer, rows),
        half_of_epochs_by=half_of_epochs_by(len(lengths), longer, rows),
        padding_share=_padded(examples, padded_tokens(lengths, rows)).padding_share,
    )
    return batch, profile


def _ways(
    recipe: Recipe, simulations: Simulations, examples: NDArray[np.int64], own_batch: MicroBatch
) -> Iterator[Way]:
    """The ways to put the rows into batches: shuffled, cut off at what fits, grouped by length, and packed
    where that is possible."""
    from harness.data import pack

    rows = own_batch.rows
    cut = _cut(recipe, examples, recipe.seq_len)
    batches = -(-len(cut) // rows)
    lost = _longer(examples, recipe.seq_len), int(examples.sum() - cut.sum())
    random = _padded(cut, padded_tokens(cut.max(axis=1), rows))
    by = own_batch.half_of_epochs_by
    runs_out = "no" if not own_batch.longer_rows else "seldom" if by is None else f"half by batch {by:,}"
    peak = own_batch.peak_allocated_bytes
    yield Way("shuffled", runs_out, peak, random.padding_share, random.tokens, batches, *lost)
    shorter = _cut(recipe, examples, own_batch.fits_up_to)
    if own_batch.longer_rows and shorter.any():
        sized = recipe.model_copy(update={"micro_batch_size": rows, "seq_len": own_batch.fits_up_to})
        peak_there = _peak(simulations.profile(sized))
        less = _padded(shorter, padded_tokens(shorter.max(axis=1), rows))
        loss = _longer(examples, own_batch.fits_up_to), int(examples.sum() - shorter.sum())
        name = f"seq_len={own_batch.fits_up_to}"
        yield Way(name, "no", peak_there, less.padding_share, less.tokens, -(-len(shorter) // rows), *loss)
    grouped = _padded(cut, grouped_padded_tokens(cut.max(axis=1), rows, GROUPED_SEED))
    at_once = "no" if not own_batch.longer_rows else "in batch 1"
    yield Way("grouped by length", at_once, peak, grouped.padding_share, grouped.tokens, batches, *lost)
    if not recipe.writes:
        return
    packed = len(pack(cut[:, 0].tolist(), recipe.seq_len))
    tokens = packed * recipe.seq_len
    peak_packed = _peak(simulations.profile(recipe.model_copy(update={"packing": True})))
    runs_out = "no" if peak_packed is not None else "in batch 1"
    share = 1 - int(cut.sum()) / tokens
    yield Way("packing=true", runs_out, peak_packed, share, float(tokens), -(-packed // rows), *lost)


def _hours(recipe: Recipe, simulations: Simulations, way: Way) -> float | None:
    """Of an epoch: a step of micro batches of the mean length, simulated, times their number."""
    if way.peak_allocated_bytes is None:
        return None
    length = ceil(way.tokens_an_epoch / (way.micro_batches * recipe.rows))
    step_s = simulations.timed(recipe.model_copy(update={"seq_len": length})).step.time_s.median
    at_once = recipe.gradient_accumulation_steps * recipe.data_parallel_ranks
    return None if step_s is None else way.micro_batches / at_once * step_s / 3600


def _peak(profile: StepProfile) -> int | None:
    """The peak allocated bytes; None if the step does not fit."""
    return profile.memory.peak_allocated_bytes if profile.oom is None else None


def lengths_document(name: str, where: str, data: str, recipe: Recipe, found: LengthsFit) -> dict[str, Any]:
    """The answer as plain data. `where` names the device, and `data` the data set."""
    sizes = {"micro_batch_size": recipe.micro_batch_size, "seq_len": recipe.seq_len}
    return {"recipe": name, "memory": where, "data": data, **sizes, **asdict(found)}


def lengths_lines(name: str, where: str, data: str, recipe: Recipe, found: LengthsFit) -> Iterator[str]:
    """The answer as lines for a terminal."""
    yield f"{name} on {where} with {data}"
    sides = recipe.rows // recipe.micro_batch_size
    of_two = "" if sides == 1 else f" of {sides} rows; a row"
    yield (
        f"  {found.rows:,} {recipe.unit}s{of_two} of {found.tokens / found.rows / sides:,.0f} tokens in the "
        f"mean, {found.median:,} in the middle{' for the longer' if of_two else ''}, {found.longest:,} the "
        "longest"
    )
    if found.rows_cut:
        cut, lost = f"{found.rows_cut:,}", f"{found.tokens_lost:,}"
        if recipe.scores:
            yield f"  {cut} more are longer than seq_len {recipe.seq_len:,} and left out: {lost} tokens lost"
        else:
            yield f"  {cut} of them are cut off at seq_len {recipe.seq_len:,}: {lost} tokens lost"
    yield (
        f"  The worst micro batch holds the longest row, and is padded to it: {recipe.rows} x "
        f"{found.longest:,} tokens."
    )
    yield ""
    yield "Shuffled and padded to the longest row, by micro_batch_size:"
    yield f"  {recipe.unit + 's':<5}  fits up to  longer rows  runs out in an epoch  half of them by  padding"
    for batch in found.micro_batches:
        by = "-" if batch.half_of_epochs_by is None else f"batch {batch.half_of_epochs_by:,}"
        chance = "certain" if batch.chance_in_an_epoch == 1 else f"{batch.chance_in_an_epoch:.2%}"
        chance = chance if batch.longer_rows else "no"
        yield (
            f"  {batch.rows:>4} {batch.fits_up_to:>12,} {batch.longer_rows:>12,} {chance:>21} {by:>16} "
            f"{batch.padding_share:>8.1%}"
        )
    if found.ways:
        yield ""
        yield f"What else could be done, at micro_batch_size {recipe.micro_batch_size}:"
        yield ROW.format("an epoch", "peak", "runs out", "padding", "its tokens", "time")
    for way in found.ways:
        peak = "does not fit" if way.peak_allocated_bytes is None else in_gib(way.peak_allocated_bytes)
        shares = f"{way.padding_share:.1%}", f"{way.tokens_an_epoch:,.0f}"
        time = duration(way.hours_an_epoch and way.hours_an_epoch * 3600)
        yield ROW.format(way.name, peak, way.runs_out, *shares, time)
        if way.tokens_lost:
            share = way.tokens_lost / (found.tokens + found.tokens_lost)
            what = f"{way.rows_cut:,} {recipe.unit}s"
            gone = f"leaves {what} out" if recipe.scores else f"cuts {what} off"
            yield f"    {gone}: {way.tokens_lost:,} tokens, {share:.1%}, are lost"
    yield (
        "  Chances and padding are exact, over all orders; a last, smaller batch is taken to fit. Grouped by "
        f"length is one epoch with seed {GROUPED_SEED}. Times are estimated, of a step at the mean length."
    )
    for note in found.notes:
        yield f"Note: {note}"
