"""What keeps a larger micro batch from fitting, in words with sizes, and what costs nothing to change."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pydantic import ValidationError

from harness.errors import InputError
from harness.fit.changes import changed, overrides
from harness.fit.derived import MEANINGS, dimensions, heads
from harness.fit.exact import fits_at_least
from harness.fit.simulations import Simulations
from harness.formula import Factors, Point, Size, Sum, Term, in_dimensions, point_of, terms_at_peak
from harness.recipe import Recipe
from harness.units import counted, in_gib

GROWING = ("activations", "temporaries", "inputs")
NEUTRAL = {"loss": "fused_linear"}
"""The same weights, trained to the same values: logits are never there as a whole. It costs time where the
head is a large part of the model, and trained."""
NOTHING = 0.05
"""More time a token than this is said. Estimated ratios of two recipes were 2.5 % off in the middle, and
at most 28 % (docs/time.md)."""
TELLING = 0.01
"""Of the peak: where less of it grows, another moment is the peak of a larger batch."""
WORTH_A_SEARCH = 0.15
"""Of the peak: where the logits hold less, another loss brings little."""


@dataclass(frozen=True)
class HeldBack:
    """Of the largest step that fits, what most of its growing memory is."""

    sentence: str
    logits: bool
    """Whether it is as large as tokens times vocabulary."""
    grows: bool = True
    """False: nothing that is there at the peak grows with the batch; a larger one has its peak elsewhere."""

    @property
    def in_words(self) -> str:
        """The sentence, and what it speaks of."""
        return f"{'what grows most' if self.grows else 'what fills most of the rest'}: {self.sentence}"


def held_back(recipe: Recipe, simulations: Simulations) -> HeldBack | None:
    """The largest sort of memory at the peak of `recipe` that grows with its sizes; None where no formula
    knows it."""
    formula, point = simulations.formula(recipe), point_of(recipe)
    piece = formula.knowing(point)
    if piece is None or not piece.labels:
        return None
    found = terms_at_peak(piece, point)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    owners: dict[str, set[str]] = {}
    letters = dimensions(recipe)
    if len({tokens for _, tokens in piece.points}) == 1:  # of one length: it stands in the coefficients
        letters = {"S": point.seq_len, **letters} | heads(recipe)
    terms = [term for term in found.terms if term.category in GROWING]
    growing = [term for term in terms if _grows(term.size)]
    if sum(term.rounded_bytes for term in growing) < TELLING * found.total_bytes:
        growing = []
    if not growing and recipe.dp_shard > 1:
        letters = _of_a_shard(letters, recipe.dp_shard)
    # of one size nobody knows what grows, but the optimizer's tensors are as large as weights
    known = piece.explains or found.phase == "optimizer_step"
    for term in growing or terms:
        size = in_dimensions(term.size if known else _of_rows(term, point), letters)
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
    used = [name for name in letters if name in size.replace("·", " ").split() and name != "S"]
    meant = [f"{name} = {letters[name]:,} {MEANINGS[name[0]]}{_each(name)}" for name in used]
    if growing or {"B", "S"} & {*size.partition(" ")[0].split("·")}:
        meant[:0] = [f"B = {counted(point.micro_batch_size, recipe.unit)}", f"S = {point.seq_len:,} tokens"]
    sentence = f"{what}: {count}{size} = {in_gib(size_bytes)} of {in_gib(found.total_bytes)}"
    if meant:
        sentence += f", with {', '.join(meant)}"
    return HeldBack(sentence, logits and share >= WORTH_A_SEARCH, bool(growing))


def _grows(size: Size) -> bool:
    """Whether it depends on the batch or the sequence, as far as they differed where it was derived."""
    return not isinstance(size, Sum) or any(factors.batch or factors.sequence for _, factors in size.terms)


def _of_a_shard(letters: dict[str, int], gpus: int) -> dict[str, int]:
    """Each GPU has a part of a weight: H/8, and no other dimension, which would be as large by chance."""
    part = letters["H"] // gpus if letters.get("H", 1) % gpus == 0 else 0
    return {f"H/{gpus}": part, **{k: v for k, v in letters.items() if v != part}} if part else letters


def _each(name: str) -> str:
    return f", a part on each of {name.partition('/')[2]} GPUs" if "/" in name else ""


def _of_rows(term: Term, point: Point) -> Size:
    """As it is where it grows with the batch alone: seen at one size, nobody knows what it grows with."""
    each_bytes = term.size_bytes // term.count
    return Sum(((Fraction(each_bytes, point.micro_batch_size), Factors(batch=1)),))


class NeutralChange(NamedTuple):
    """Overrides with which the same weights are trained to the same values, and what they bring."""

    overrides: str
    micro_batch_size: int
    """That is seen to fit with them, the recipe's own or a larger one; 0: none."""
    slowdown: float | None
    """Time a token over that without them, at the sizes asked about; None where nobody knows."""


def cost_in_words(slowdown: float | None) -> str:
    """Of a change that is no other training."""
    if slowdown is None or slowdown - 1 < NOTHING:
        return "which costs next to nothing"
    return f"with which a token takes {slowdown - 1:.0%} longer"


def with_neutral_change(recipe: Recipe, simulations: Simulations) -> NeutralChange | None:
    """None where the recipe has what costs nothing, or cannot have it."""
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
    """The recipe with what costs nothing; None where it has that, or cannot."""
    try:
        other = changed(recipe, NEUTRAL)
    except (ValidationError, InputError):
        return None
    return None if other == recipe else other
