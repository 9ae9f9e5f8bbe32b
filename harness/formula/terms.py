"""The bytes at the peak as a sum of terms that a person can check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod
from typing import NamedTuple

from harness.formula.expression import Factors, Point, Sum
from harness.formula.outcome import ROUNDED_TO
from harness.formula.piece import Piece, Size
from harness.formula.request_log import DIED, Label
from harness.units import round_up

ELEMENT_BYTES = tuple(map(Fraction, (2, 4, 1, 8)))
"""How many bytes an element may have, the likeliest first."""
OF_ONE_WEIGHT = {
    ("quantize_4bit", 1): Fraction(1, 2),
    ("quantize_4bit", 4): Fraction(4, 64),
    ("quantize_blockwise", 1): Fraction(1, 64),
    ("quantize_blockwise", 4): Fraction(4, 64 * 256),
}
"""Bytes for each number of a weight that bitsandbytes quantizes, by the operator and the bytes of what it
makes: half a byte, and a constant for 64 of them; with double quantization one byte, and a constant for 256
of these."""
OF_8_BIT_STATE = Fraction(4, 256)
"""Bytes for each number of an optimizer's state in 8 bit, of the constants beside it: one for 256 of them."""
UNLABELLED = Label("other", "", "")


@dataclass(frozen=True)
class Term:
    """Allocations with the same label and the same size that are alive at the peak."""

    category: str
    module: str
    operator: str
    element_bytes: int
    """These four are the label of the allocations (request_log.py)."""
    count: int
    """How many of them there are."""
    size: Size
    """The bytes of one, as an expression of batch and sequence."""
    size_bytes: int
    """Requested bytes of all of them together, at the point that was asked for."""
    rounded_bytes: int
    """The same as the allocator counts it, in whole blocks of 512 bytes."""

    @property
    def widths(self) -> tuple[Fraction, ...]:
        """The bytes that one number of it may have: one where its tensor is known, none where it has none."""
        if self.operator == "workspace":
            return ()
        if self.category == "optimizer_state" and self.operator == "zeros":
            return Fraction(self.element_bytes), OF_8_BIT_STATE
        quantized = OF_ONE_WEIGHT.get((self.operator, self.element_bytes))
        known = quantized or Fraction(self.element_bytes)
        return (known,) if known else ELEMENT_BYTES

    @property
    def expected(self) -> str:
        """The letters of the dimensions that its module has, besides those of all modules."""
        return "R" * ("lora_" in self.module) + "XT" * (".experts" in self.module)


@dataclass(frozen=True)
class Terms:
    """Everything that is alive at the peak, the largest first."""

    phase: str
    """The phase in which the peak is."""
    terms: list[Term]

    @property
    def total_bytes(self) -> int:
        """The allocated peak. It leaves out what a block has beyond its request where it was not split."""
        return sum(term.rounded_bytes for term in self.terms)


def terms_at_peak(piece: Piece, point: Point) -> Terms:
    """What is alive at the peak of the recorded step of `piece`, for the sizes of `point`. Raises ValueError
    where a size is not known there."""
    log = piece.at(point)
    sizes: dict[int, int] = {}
    now = peak = peak_event = 0
    start = log.start
    for index, (key, size_bytes, _) in enumerate(log.events):
        if size_bytes == DIED:
            now -= sizes.pop(key)
        else:
            sizes[key] = round_up(size_bytes, ROUNDED_TO)
            now += sizes[key]
        if index >= start and now > peak:
            peak, peak_event = now, index
    alive: set[int] = set()
    for key, size_bytes, _ in log.events[: peak_event + 1]:
        alive.discard(key) if size_bytes == DIED else alive.add(key)
    phase = [mark.phase for mark in log.marks if mark.at <= peak_event and mark.what == "phase"][-1]
    return Terms(phase, _grouped(piece, point, alive))


def _grouped(piece: Piece, point: Point, alive: set[int]) -> list[Term]:
    """The allocations numbered in `alive`, those with the same label and size as one term."""
    kinds: Counter[tuple[Label, int]] = Counter()
    for birth in alive:
        label = piece.label_of[birth]
        kinds[piece.labels[label] if label >= 0 else UNLABELLED, piece.column_of[birth]] += 1
    terms: list[Term] = []
    for (label, column), count in kinds.items():
        size = piece.columns[column]
        size_bytes = size.at(point)
        terms.append(Term(*label, count, size, count * size_bytes, count * round_up(size_bytes, ROUNDED_TO)))
    return sorted(terms, key=lambda term: -term.rounded_bytes)


def in_dimensions(
    size: Size,
    names: Mapping[str, int],
    widths: Sequence[Fraction] = ELEMENT_BYTES,
    *,
    of_tokens: bool = False,
    parts: int = 1,
    expected: str = "",
) -> str:
    """A size in words of the model: 8192·B·S becomes B·S·H × 2 B, if the hidden size H is 4096.

    The coefficient is written as a product of dimensions in `names` and the bytes of an element, one of
    `widths`, where there is such a product that a tensor of a step may have. Those with the `expected`
    letters win, then one matrix over several in one, such as 2·H·F, then numbers of 2 or 4 bytes, then the
    fewest dimensions, then those that `names` has first. With `parts` a tensor may be divided: H·F/8.

    `names` may have the heads N, for scores of attention: B·S²·N × 4 B. It may have S or B or both, where
    the formula holds for one sequence length or micro batch alone. Then a size that grows with the other, or
    any size if `of_tokens`, is taken to hold tokens: one factor S is likelier than two."""
    if not isinstance(size, Sum) or len(size.terms) != 1:
        return str(size)
    ((coefficient, factors),) = size.terms
    tokens = max(factors.batch, of_tokens) if "S" in names else 0
    rows = max(min(1, factors.sequence), of_tokens) if "B" in names else 0

    def unlikely(found: _Product) -> tuple[int, int, int, bool]:
        times, chosen, width, _ = found
        numbers = any(name not in ("B", "S") for name in chosen)  # without them it may be a mask, or tokens
        sizes = abs(chosen.count("S") - tokens) + abs(chosen.count("B") - rows)
        missing = len({*expected} - {*chosen})
        return missing, times, sizes, numbers and width not in ELEMENT_BYTES[:2]

    products = [
        _Product(times, chosen, width, of)
        for of in dict.fromkeys((parts, 1))
        for times in (1, 2, 3, 4)
        for chosen, width in _named(coefficient * of / times, factors, names, widths)
    ]
    if not products:
        return str(size) if str(factors) else f"{int(coefficient):,} B"
    times, chosen, width, of = min(products, key=unlikely)
    rest = [name for name in chosen if name != "B"]
    several = str(times) if times > 1 else ""
    product = "·".join(part for part in (several, "B" * chosen.count("B"), str(factors), *rest) if part)
    return f"{product}{f'/{of}' * (of > 1)} × {width} B" if product else f"{width} B"


class _Product(NamedTuple):
    """So many matrices of the chosen dimensions with numbers of so many bytes, of which one in `of` parts."""

    times: int
    chosen: list[str]
    width: Fraction
    of: int


def _named(
    coefficient: Fraction, factors: Factors, names: Mapping[str, int], widths: Sequence[Fraction]
) -> Iterator[tuple[list[str], Fraction]]:
    """Every product of dimensions and element bytes that is `coefficient`, the shortest first."""
    for count in range(5 if {"B", "S"} <= {*names} else 4):
        for chosen in combinations_with_replacement(names, count):
            for width in widths:
                size = prod(names[name] for name in chosen) * width
                if size == coefficient and _may_be(factors, chosen, width):
                    yield list(chosen), width


def _may_be(factors: Factors, chosen: tuple[str, ...], width: Fraction) -> bool:
    """Whether a tensor of a step may have these dimensions: scores and masks of attention S², and the scores
    the heads N; other tokens one dimension, for each of T experts; a weight two, of which one may be an
    adapter's rank R, and those of X experts a third."""
    lengths = factors.sequence + chosen.count("S")
    others = [name for name in chosen if name not in ("B", "S")]
    if factors.batch + chosen.count("B") > 1:
        return False
    if lengths == 2:
        return others in ([], ["N"])
    if lengths > 2 or ("R" in others and width == 8):
        return False
    if lengths or factors.batch or "B" in chosen:
        return len(others) - ("T" in others) < 2 and ("N" not in others or width == 4)
    if {"N", "T"} & {*others} or others.count("X") > 1 or ("D" in others and len(others) > 1):
        return False
    if "X" in others and not ({"H", "R"} & {*others} and {*others} <= {*"EFHRX"}):
        return False
    return len(others) < 3 + others.count("X") and others not in (["R"], ["R", "R"])
