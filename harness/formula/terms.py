"""The bytes at the peak as a sum of terms that a person can check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod

from harness.formula.expression import Factors, Point, Sum
from harness.formula.outcome import ROUNDED_TO
from harness.formula.piece import Piece, Size
from harness.formula.request_log import DIED, Label

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
            sizes[key] = _in_blocks(size_bytes)
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
        terms.append(Term(*label, count, size, count * size_bytes, count * _in_blocks(size_bytes)))
    return sorted(terms, key=lambda term: -term.rounded_bytes)


def _in_blocks(size_bytes: int) -> int:
    return -(-size_bytes // ROUNDED_TO) * ROUNDED_TO


def in_dimensions(size: Size, names: Mapping[str, int]) -> str:
    """A size with its coefficient as a product of the model's own dimensions and the bytes of an element,
    where there is such a product of at most two: 8192·B·S is B·S·H × 2 B. What is named first comes first."""
    if not isinstance(size, Sum) or len(size.terms) != 1:
        return str(size)
    ((coefficient, factors),) = size.terms
    named = _named(coefficient, names)
    return str(size) if named is None else _spelled(factors, *named)


def _named(coefficient: Fraction, names: Mapping[str, int]) -> tuple[list[str], int] | None:
    for count in (0, 1, 2):
        for chosen in combinations_with_replacement(names, count):
            for width in ELEMENT_BYTES:
                if prod(names[name] for name in chosen) * width == coefficient:
                    return list(chosen), width
    return None


def _spelled(factors: Factors, names: list[str], width: int) -> str:
    product = "·".join([name for name in (str(factors), *names) if name])
    return f"{product} × {width} B" if product else f"{width} B"
