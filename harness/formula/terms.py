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
NOBODY = Label("other", "", "")


@dataclass(frozen=True)
class Term:
    """Requests of one kind and one size that are there at the peak."""

    category: str
    module: str
    operator: str
    count: int
    size: Size
    size_bytes: int
    """Of all of them, at the point that was asked for, as requested."""
    rounded_bytes: int
    """As the allocator counts them: in whole blocks of 512 bytes."""


@dataclass(frozen=True)
class Terms:
    """All that is there at the peak, the largest first."""

    phase: str
    terms: list[Term]

    @property
    def total_bytes(self) -> int:
        """The allocated peak, but for what the allocator does not split off a larger block."""
        return sum(term.rounded_bytes for term in self.terms)


def terms_at_peak(piece: Piece, point: Point) -> Terms:
    """What of a piece is there at the peak of its recorded step, asked at `point`. Raises ValueError where a
    size is not known."""
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
    kinds: Counter[tuple[Label, int]] = Counter()
    for birth in alive:
        label = piece.label_of[birth]
        kinds[piece.labels[label] if label >= 0 else NOBODY, piece.column_of[birth]] += 1
    terms: list[Term] = []
    for (label, column), count in kinds.items():
        size = piece.columns[column]
        size_bytes = size.at(point)
        terms.append(Term(*label, count, size, count * size_bytes, count * round_up(size_bytes, ROUNDED_TO)))
    return sorted(terms, key=lambda term: -term.rounded_bytes)


def in_dimensions(size: Size, names: Mapping[str, int]) -> str:
    """A size with its coefficient as a product of the model's own dimensions and the bytes of an element,
    where there is such a product of at most two: 8192·B·S is B·S·H × 2 B. What is named first comes first.

    `names` may have S, where the size is one of a fixed length: what grows with the batch has tokens then,
    one factor of them before two, and three factors with the heads N (scores of attention: B·S·S·N × 4 B)."""
    if not isinstance(size, Sum) or len(size.terms) != 1:
        return str(size)
    ((coefficient, factors),) = size.terms
    tokens = factors.batch if "S" in names else 0

    def unlikely(found: tuple[list[str], int]) -> tuple[int, bool]:
        chosen, width = found
        return abs(chosen.count("S") - tokens), "S" in names and width not in ELEMENT_BYTES[:2]

    best = min(_named(coefficient, names), key=unlikely, default=None)
    return str(size) if best is None else _spelled(factors, *best)


def _named(coefficient: Fraction, names: Mapping[str, int]) -> Iterator[tuple[list[str], int]]:
    """Every product, the shortest first."""
    for count in (0, 1, 2, 3):
        for chosen in combinations_with_replacement(names, count):
            for width in ELEMENT_BYTES:
                scores = count < 3 or (chosen.count("S") == 2 and "N" in chosen)
                if scores and prod(names[name] for name in chosen) * width == coefficient:
                    yield list(chosen), width


def _spelled(factors: Factors, names: list[str], width: int) -> str:
    product = "·".join([name for name in (str(factors), *names) if name])
    return f"{product} × {width} B" if product else f"{width} B"
