"""Sizes in bytes as expressions of batch and sequence: derived from examples, and evaluated to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

from harness.formula.scratch import RULES, Ruled


class Point(NamedTuple):
    """The two sizes at which a step was simulated, or that a question is about."""

    micro_batch_size: int
    seq_len: int
    """In tokens."""


@dataclass(frozen=True)
class Factors:
    """A product of powers of the micro batch size and the sequence length."""

    batch: int = 0
    """The exponent of the micro batch size."""
    sequence: int = 0
    """The exponent of the sequence length."""
    rounded_to: int = 1
    """The sequence length is first rounded up to a multiple of it, as kernels pad it."""

    def at(self, point: Point) -> int:
        rounded = -(-point.seq_len // self.rounded_to) * self.rounded_to
        return point.micro_batch_size**self.batch * rounded**self.sequence

    def __str__(self) -> str:
        sequence = f"S↑{self.rounded_to}" if self.rounded_to > 1 else "S"
        powers = [("B", self.batch), (sequence, self.sequence)]
        return "·".join(name + ("²" if power == 2 else "") for name, power in powers if power)


PLAIN = [Factors(batch, sequence) for sequence in (0, 1, 2) for batch in (0, 1)]
"""What a size may be a multiple of, the simplest first."""
ROUNDED = [
    Factors(batch, sequence, rounded_to)
    for rounded_to in (32, 64, 128, 256)
    for sequence in (1, 2)
    for batch in (0, 1)
]
"""The same with padded sequences: attention kernels pad rows or columns to their tiles."""
MOST_TERMS = 3
"""A derived sum has no more terms than this."""


@dataclass(frozen=True)
class Sum:
    """A size in bytes as a sum of coefficients times factors."""

    terms: tuple[tuple[Fraction, Factors], ...]

    def at(self, point: Point) -> int:
        """Its value in bytes. Raises ValueError where that is no whole number: there the sum is wrong."""
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
    """A size in bytes that a library's rule computes (formula/scratch.py), with sums as its arguments."""

    name: str
    arguments: tuple[Sum, ...]

    def at(self, point: Point) -> int:
        """Its value in bytes, a Ruled. Raises ValueError where an argument is no whole number."""
        return RULES[self.name](*(argument.at(point) for argument in self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


Expression = Sum | Rule


def explain(values: Sequence[int], points: Sequence[Point]) -> tuple[Expression | None, bool]:
    """The simplest expression that has these `values`, in bytes, at these `points`; None if there is none.

    Also returns whether it is sure: there were more points than the expression has coefficients to fit.
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
    """The combinations of factors that a size may be a sum of, the simplest first. Of factors that are
    proportional at all `points`, and so cannot be told apart, only the simplest is tried."""
    distinct: dict[tuple[Fraction, ...], Factors] = {}
    for factors in [*PLAIN, *ROUNDED]:
        values = [factors.at(point) for point in points]
        distinct.setdefault(tuple(Fraction(value, values[0]) for value in values), factors)
    for count in range(1, min(MOST_TERMS, len(points)) + 1):
        yield from combinations(distinct.values(), count)


def _solved(values: Sequence[int], points: Sequence[Point], factors: Sequence[Factors]) -> Sum | None:
    """The sum of these factors that has all `values` exactly, by Gaussian elimination. None where there is
    none whose coefficients are positive and no odd fractions."""
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
    coefficients = [rows[n][-1] / rows[n][n] for n in range(len(factors))]
    if any(c <= 0 or c.denominator > 64 for c in coefficients):
        return None
    return Sum(tuple(zip(coefficients, factors, strict=True)))


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
