"""Which memory keeps a larger micro batch from fitting, as a sentence with sizes, and a neutral change.

A neutral change trains the same weights to the same values.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from harness.errors import InputError
from harness.fit.changes import changed, overrides
from harness.fit.derived import GROWING, MEANINGS, dimensions, heads, spell, spelling
from harness.fit.exact import fits_at_least
from harness.fit.simulations import Simulations
from harness.formula import Size, Sum, point_of, terms_at_peak
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
    # seen at one size, nothing shows what grows, but the optimizer's tensors are as large as weights
    known = piece.explains or found.phase == "optimizer_step"
    for term in growing or terms:
        size = spell(term, letters, of_tokens=found.phase != "optimizer_step", gpus=recipe.dp_shard)
        if not known and "S" not in size:
            size = in_gib(term.rounded_bytes // term.count)
        sizes[size] += term.rounded_bytes
        counts[size] += term.count
        owners.setdefault(size, set()).add(term.category)
    if not sizes:
        return None
    size, size_bytes = sizes.most_common(1)[0]
    product, _, per_gpu = size.partition(" ")[0].partition("/")
    logits = "V" in product
    what = "logits, their copies and gradients" if logits else " and ".join(sorted(owners[size]))
    count = f"{counts[size]} × " if counts[size] > 1 else ""
    share = size_bytes / found.total_bytes
    used = [name for name in letters if name in product and name not in ("B", "S")]
    meant = [f"{name} = {letters[name]:,} {MEANINGS[name]}" for name in used]
    if per_gpu:
        meant.append(f"a part on each of {per_gpu} GPUs")
    grows = bool(growing) or bool({"B", "S"} & {*product})
    if grows:
        meant[:0] = [f"B = {counted(point.micro_batch_size, recipe.unit)}", f"S = {point.seq_len:,} tokens"]
    sentence = f"{what}: {count}{size} = {in_gib(size_bytes)} of {in_gib(found.total_bytes)}"
    if meant:
        sentence += f", with {', '.join(meant)}"
    return HeldBack(sentence, logits and share >= WORTH_A_SEARCH, grows)


def _grows(size: Size) -> bool:
    """Whether a size depends on batch or sequence, as far as these differed in the simulations."""
    return not isinstance(size, Sum) or any(factors.batch or factors.sequence for _, factors in size.terms)


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
