"""Which memory keeps a larger micro batch from fitting, as a sentence with sizes, and a neutral change.

A neutral change trains the same weights to the same values.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from harness.errors import InputError
from harness.fit.changes import changed, overrides
from harness.fit.derived import GROWING, MEANINGS, dimensions, heads, spelling
from harness.fit.exact import fits_at_least
from harness.fit.simulations import Simulations
from harness.formula import Size, Sum, in_dimensions, point_of, terms_at_peak
from harness.recipe import Recipe
from harness.units import counted, in_gib

NEUTRAL = {"loss": "fused_linear"}
"""The recipe fields of the neutral change. With it the logits never exist as a whole. It costs time where the
head is trained and a large part of the model."""
NOTHING = 0.05
"""A change that makes a token slower by a smaller fraction than this is said to cost next to nothing. The
median error of estimated time ratios of two recipes was 2.5 %, the largest 28 % (docs/time.md)."""
TELLING = 0.01
"""A fraction of the peak. Where less grows with the batch, a larger batch peaks at another moment."""
WORTH_A_SEARCH = 0.15
"""A fraction of the peak. Where the logits hold less than this, another loss saves little."""


@dataclass(frozen=True)
class HeldBack:
    """The largest sort of memory at the peak that grows with the batch."""

    sentence: str
    """What it is and how large, with the formula."""
    logits: bool
    """Whether it is logits (as large as tokens times vocabulary), and holds WORTH_A_SEARCH of the peak."""
    grows: bool = True
    """False where nothing at the peak grows with the batch: a larger batch then peaks at another moment."""

    @property
    def in_words(self) -> str:
        """The sentence with an introduction."""
        beside = "what fills most beside weights, gradients and optimizer state"
        return f"{'what grows most' if self.grows else beside}: {self.sentence}"


def held_back(recipe: Recipe, simulations: Simulations) -> HeldBack | None:
    """The largest sort of memory at the peak of `recipe` that grows with its sizes; None where there is no
    formula that is exact for it."""
    formula, point = simulations.formula(recipe), point_of(recipe)
    piece = formula.knowing(point)
    if piece is None or not piece.labels:
        return None
    found = terms_at_peak(piece, point)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    owners: dict[str, set[str]] = {}
    letters = spelling(dimensions(recipe) | heads(recipe), piece)
    terms = [term for term in found.terms if term.category in GROWING]
    growing = [term for term in terms if _grows(term.size)]
    if sum(term.rounded_bytes for term in growing) < TELLING * found.total_bytes:
        growing = []
    if not growing and recipe.dp_shard > 1:
        letters = _of_a_shard(letters, recipe.dp_shard)
    # seen at one size, nothing shows what grows, but the optimizer's tensors are as large as weights
    known = piece.explains or found.phase == "optimizer_step"
    for term in growing or terms:
        size = in_dimensions(term.size, letters, term.widths, of_tokens=found.phase != "optimizer_step")
        if not known and "S" not in size:
            size = in_gib(term.rounded_bytes // term.count)
        sizes[size] += term.rounded_bytes
        counts[size] += term.count
        owners.setdefault(size, set()).add(term.category)
    if not sizes:
        return None
    size, size_bytes = sizes.most_common(1)[0]
    logits = "V" in size.split(" ")[0].split("·")
    what = "logits, their copies and gradients" if logits else " and ".join(sorted(owners[size]))
    count = f"{counts[size]} × " if counts[size] > 1 else ""
    share = size_bytes / found.total_bytes
    used = [name for name in letters if name in size.replace("·", " ").split() and name not in ("B", "S")]
    meant = [f"{name} = {letters[name]:,} {MEANINGS[name[0]]}{_each(name)}" for name in used]
    grows = bool(growing) or bool({"B", "S"} & {*size.partition(" ")[0].split("·")})
    if grows:
        meant[:0] = [f"B = {counted(point.micro_batch_size, recipe.unit)}", f"S = {point.seq_len:,} tokens"]
    sentence = f"{what}: {count}{size} = {in_gib(size_bytes)} of {in_gib(found.total_bytes)}"
    if meant:
        sentence += f", with {', '.join(meant)}"
    return HeldBack(sentence, logits and share >= WORTH_A_SEARCH, grows)


def _grows(size: Size) -> bool:
    """Whether a size depends on batch or sequence, as far as these differed in the simulations."""
    return not isinstance(size, Sum) or any(factors.batch or factors.sequence for _, factors in size.terms)


def _of_a_shard(letters: dict[str, int], gpus: int) -> dict[str, int]:
    """The dimensions with H/8, say, since each of 8 GPUs has a part of a weight. A dimension that is as large
    by chance is left out."""
    part = letters["H"] // gpus if letters.get("H", 1) % gpus == 0 else 0
    return {f"H/{gpus}": part, **{k: v for k, v in letters.items() if v != part}} if part else letters


def _each(name: str) -> str:
    """The explanation of a dimension that is divided among GPUs; empty for any other."""
    return f", a part on each of {name.partition('/')[2]} GPUs" if "/" in name else ""


class NeutralChange(NamedTuple):
    """A change with which the same weights are trained to the same values, and what it brings."""

    overrides: str
    """The change as `field=value` words for a shell."""
    micro_batch_size: int
    """A size that fits with the change in a simulation; 0 if none was found."""
    slowdown: float | None
    """The time for a token with the change over that without, at the recipe's sizes; None if unknown."""


def cost_in_words(slowdown: float | None) -> str:
    """A clause about the time that a neutral change costs."""
    if slowdown is None or slowdown - 1 < NOTHING:
        return "which costs next to nothing"
    return f"with which a token takes {slowdown - 1:.0%} longer"


def with_neutral_change(recipe: Recipe, simulations: Simulations) -> NeutralChange | None:
    """What the neutral change brings; None where the recipe has it already, or cannot have it."""
    other = neutrally_changed(recipe)
    if other is None:
        return None
    try:
        fits = fits_at_least(other, simulations)
        now, then = (simulations.timed(each).step.tokens_per_s for each in (recipe, other))
        return NeutralChange(overrides(recipe, NEUTRAL), fits, now / then if now and then else None)
    except (ValidationError, InputError):  # this model, or this installation, cannot have it
        return None


def neutrally_changed(recipe: Recipe) -> Recipe | None:
    """The recipe with the neutral change; None where it has it already, or cannot have it."""
    try:
        other = changed(recipe, NEUTRAL)
    except (ValidationError, InputError):
        return None
    return None if other == recipe else other
