"""The bytes at the peak as a sum of terms that a person can check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod

from harness.formula.expression import Factors, Point, Sum
from harness.formula.outcome import ROUNDED_TO
from harness.formula.piece import Piece, Size
from harness.formula.request_log import DIED, Label
from harness.units import round_up

ELEMENT_BYTES = (2, 4, 1, 8)
"""How many bytes an element may have, the likeliest first."""
UNLABELLED = Label("other", "", "")


@dataclass(frozen=True)
class Term:
    """Allocations with the same label and the same size that are alive at the peak."""

    category: str
    module: str
    operator: str
    """These three are the label of the allocations (request_log.py)."""
    count: int
    """How many of them there are."""
    size: Size
    """The bytes of one, as an expression of batch and sequence."""
    size_bytes: int
    """Requested bytes of all of them together, at the point that was asked for."""
    rounded_bytes: int
    """The same as the allocator counts it, in whole blocks of 512 bytes."""


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


def in_dimensions(size: Size, names: Mapping[str, int]) -> str:
    """A size in words of the model: 8192·B·S becomes B·S·H × 2 B, if the hidden size H is 4096.

    The coefficient is written as a product of dimensions in `names` and the bytes of an element, where there
    is such a product that a tensor of a step may have. Numbers of 2 or 4 bytes win, then the fewest
    dimensions, then those that `names` has first. `names` may have the heads N, for scores of attention:
    B·S²·N × 4 B. It may have S or B, where the formula holds for one sequence length or micro batch alone.
    Then a size that grows with the other is taken to hold tokens: one factor S is likelier than two."""
    if not isinstance(size, Sum) or len(size.terms) != 1:
        return str(size)
    ((coefficient, factors),) = size.terms
    tokens = factors.batch if "S" in names else 0
    rows = min(1, factors.sequence) if "B" in names else 0

    def unlikely(found: tuple[list[str], int]) -> tuple[int, bool]:
        chosen, width = found
        numbers = any(name not in ("B", "S") for name in chosen)  # without them it may be a mask, or tokens
        sizes = abs(chosen.count("S") - tokens) + abs(chosen.count("B") - rows)
        return sizes, numbers and width not in ELEMENT_BYTES[:2]

    best = min(_named(coefficient, factors, names), key=unlikely, default=None)
    if best is None:
        return str(size)
    chosen, width = best
    rest = [name for name in chosen if name != "B"]
    product = "·".join([name for name in ("B" * chosen.count("B"), str(factors), *rest) if name])
    return f"{product} × {width} B" if product else f"{width} B"


def _named(
    coefficient: Fraction, factors: Factors, names: Mapping[str, int]
) -> Iterator[tuple[list[str], int]]:
    """Every product of dimensions and element bytes that is `coefficient`, the shortest first."""
    for count in (0, 1, 2, 3):
        for chosen in combinations_with_replacement(names, count):
            for width in ELEMENT_BYTES:
                size = prod(names[name] for name in chosen) * width
                if size == coefficient and _may_be(factors, chosen, width):
                    yield list(chosen), width


def _may_be(factors: Factors, chosen: tuple[str, ...], width: int) -> bool:
    """Whether a tensor of a step may have these dimensions: scores and masks of attention S², and the scores
    the heads N; other tokens one dimension; a weight two, of which one may be an adapter's rank R."""
    lengths = factors.sequence + chosen.count("S")
    others = [name for name in chosen if name not in ("B", "S")]
    if factors.batch + chosen.count("B") > 1:
        return False
    if lengths == 2:
        return others in ([], ["N"])
    if lengths > 2 or "N" in others or ("R" in others and width == 8):
        return False
    if lengths or factors.batch or "B" in chosen:
        return len(others) < 2
    return len(others) < 3 and others not in (["R"], ["R", "R"])
