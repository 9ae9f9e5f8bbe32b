"""Sizes as expressions of batch and sequence: found from examples, kept as text, evaluated to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

from harness.formula.scratch import RULES, Ruled


class Point(NamedTuple):
    """The sizes at which a step was simulated, or is asked about."""

    micro_batch_size: int
    seq_len: int


@dataclass(frozen=True)
class Factors:
    """A product of powers of the two sizes; the sequence may be rounded up first, as kernels pad it."""

    batch: int = 0
    sequence: int = 0
    rounded_to: int = 1

    def at(self, point: Point) -> int:
        rounded = -(-point.seq_len // self.rounded_to) * self.rounded_to
        return point.micro_batch_size**self.batch * rounded**self.sequence

    def __str__(self) -> str:
        sequence = f"S↑{self.rounded_to}" if self.rounded_to > 1 else "S"
        powers = [("B", self.batch), (sequence, self.sequence)]
        return "·".join(name + ("²" if power == 2 else "") for name, power in powers if power)


PLAIN = [Factors(batch, sequence) for sequence in (0, 1, 2) for batch in (0, 1)]
ROUNDED = [
    Factors(batch, sequence, rounded_to)
    for rounded_to in (32, 64, 128, 256)
    for sequence in (1, 2)
    for batch in (0, 1)
]
"""Kernels of attention pad rows or columns to their tiles."""
MOST_TERMS = 3


@dataclass(frozen=True)
class Sum:
    """A sum of coefficients times factors, a whole number of bytes wherever it is asked for."""

    terms: tuple[tuple[Fraction, Factors], ...]

    def at(self, point: Point) -> int:
        """Its value. Raises ValueError where that is no whole number."""
        value = sum(coefficient * factors.at(point) for coefficient, factors in self.terms)
        if Fraction(value).denominator != 1:
            raise ValueError(f"{self} is no whole number at {point}")
        return int(value)

    def __str__(self) -> str:
        return " + ".join(_product(c, str(factors)) for c, factors in self.terms) or "0"


def _product(coefficient: Fraction, factors: str) -> str:
    if not factors:
        return f"{coefficient}"
    return factors if coefficient == 1 else f"{coefficient}·{factors}"


@dataclass(frozen=True)
class Rule:
    """A rule of a library (formula/scratch.py) with expressions for its arguments."""

    name: str
    arguments: tuple[Sum, ...]

    def at(self, point: Point) -> int:
        """What the rule gives there, with its name and arguments."""
        return RULES[self.name](*(argument.at(point) for argument in self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


Expression = Sum | Rule


def explain(values: Sequence[int], points: Sequence[Point]) -> tuple[Expression | None, bool]:
    """The simplest expression that gives `values` at `points`, and whether there were more points than it
    takes to make one up; None if there is none.
    """
    ruled = [value for value in values if isinstance(value, Ruled)]
    if len(ruled) == len(values) and len({(r.rule, len(r.arguments)) for r in ruled}) == 1:
        explained = [explain(column, points) for column in zip(*(r.arguments for r in ruled), strict=True)]
        arguments = [argument for argument, _ in explained if isinstance(argument, Sum)]
        if len(arguments) == len(explained):
            return Rule(ruled[0].rule, tuple(arguments)), all(sure for _, sure in explained)
    for factors in _candidates(points):
        found = _solved(values, points, factors)
        if found is not None:
            return found, len(points) > len(factors)
    return None, False


def _candidates(points: Sequence[Point]) -> Iterator[tuple[Factors, ...]]:
    """What a size may consist of, the simplest first. What is the same at all points is told apart from
    nothing, and is left out."""
    different: dict[tuple[Fraction, ...], Factors] = {}
    for factors in [*PLAIN, *ROUNDED]:
        values = [factors.at(point) for point in points]
        different.setdefault(tuple(Fraction(value, values[0]) for value in values), factors)
    apart = list(different.values())
    for count in range(1, min(MOST_TERMS, len(points)) + 1):
        yield from combinations(apart, count)


def _solved(values: Sequence[int], points: Sequence[Point], factors: Sequence[Factors]) -> Sum | None:
    """Coefficients, none below 0, with which these factors give all values."""
    rows = [
        [Fraction(f.at(point)) for f in factors] + [Fraction(value)]
        for point, value in zip(points, values, strict=True)
    ]
    for column in range(len(factors)):
        pivot = next((n for n in range(column, len(rows)) if rows[n][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        first = rows[column]
        for n, row in enumerate(rows):
            if n != column and row[column]:
                factor = row[column] / first[column]
                rows[n] = [a - factor * b for a, b in zip(row, first, strict=True)]
    if any(row[-1] for row in rows[len(factors) :]):
        return None
    found = [rows[n][-1] / rows[n][n] for n in range(len(factors))]
    if any(c <= 0 or c.denominator > 64 for c in found):
        return None
    return Sum(tuple(zip(found, factors, strict=True)))


def to_json(expression: Expression) -> list[Any]:
    """The expression as plain data."""
    if isinstance(expression, Rule):
        return [expression.name, *(to_json(argument) for argument in expression.arguments)]
    return [[str(c), f.batch, f.sequence, f.rounded_to] for c, f in expression.terms]


def from_json(document: list[Any]) -> Expression:
    """What `to_json` wrote. Raises ValueError for a rule that this release does not have."""
    if document and isinstance(document[0], str):
        name, *arguments = document
        if name not in RULES:
            raise ValueError(f"no rule {name}")
        return Rule(name, tuple(_sum(argument) for argument in arguments))
    return _sum(document)


def _sum(document: list[Any]) -> Sum:
    terms = [(Fraction(coefficient), Factors(*powers)) for coefficient, *powers in document]
    return Sum(tuple(terms))
