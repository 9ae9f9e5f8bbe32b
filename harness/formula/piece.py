"""A piece of a formula: one order of requests, with each size as an expression of batch and sequence.

At other batch sizes or sequence lengths a step may make other requests (another kernel runs, say), which are
then another piece. An allocation is called a birth here, and its free a death, as in request_log.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

from harness.formula.expression import Expression, Point, explain, from_json, to_json
from harness.formula.request_log import BIRTH, DIED, Label, Mark, RequestLog, settled
from harness.formula.scratch import Ruled


@dataclass(frozen=True)
class Listed:
    """A size in bytes that no expression explains, and that is known only at the points where it was seen."""

    values: tuple[int, ...]
    points: tuple[Point, ...]

    def at(self, point: Point) -> int:
        """Its value in bytes. Raises ValueError for a point where it was not seen."""
        return self.values[self.points.index(point)]

    def __str__(self) -> str:
        return "not known but where it was seen"


Size = Expression | Listed


@dataclass
class Piece:
    """One sequence of allocations and frees, and the size of each allocation as an expression.

    Allocations are numbered from 0 in their order, and lists "of each allocation" are in that order.
    """

    points: list[Point]
    """The sizes at which the step was simulated."""
    events: list[int]
    """The allocations and frees in order, as RequestLog.numbered has them."""
    streams: list[int]
    """The CUDA stream of each allocation."""
    marks: list[Mark]
    """Where phases and steps begin, as in the RequestLog."""
    lost: list[int]
    """The numbers of the allocations that are never freed."""
    column_of: list[int]
    """The index into `columns` of the size of each allocation."""
    columns: list[Size]
    """The different sizes, each once."""
    sure: bool = False
    """Whether every expression explains more points than it takes to fit one."""
    labels: list[Label] = field(default_factory=list[Label])
    """The different labels of the allocations that are alive in the recorded step, each once."""
    label_of: list[int] = field(default_factory=list[int])
    """The index into `labels` of each allocation; -1 for one without a label."""
    whole: list[Point] = field(default_factory=list[Point])
    """Those of the points at which the model was simulated with all of its layers (fit/few_layers.py)."""

    @classmethod
    def of(
        cls, log: RequestLog, point: Point, labels: Mapping[int, Label] | None = None, *, whole: bool = True
    ) -> Piece:
        """The piece of one simulation, which holds at its `point` alone. `labels` are by key of the log;
        `whole` says whether the model had all of its layers."""
        born = [event for event in log.events if event[1] != DIED]
        piece = cls(
            [],
            log.numbered(),
            [stream for _, _, stream in born],
            log.marks,
            [n for n, (key, _, _) in enumerate(born) if key in log.lost],
            [0] * len(born),
            [Listed((), ())],
        )
        piece._take([size for _, size, _ in born], point)
        indices = {label: n for n, label in enumerate(dict.fromkeys((labels or {}).values()))}
        piece.labels = list(indices)
        piece.label_of = [indices[labels[key]] if labels and key in labels else -1 for key, _, _ in born]
        piece.whole = [point] * whole
        return piece

    def add(self, other: Piece) -> bool:
        """Take in the points of `other`, so that the expressions hold at these too. Returns False, and
        changes nothing, where its simulations made other requests."""
        requests = self.streams, self.marks, self.lost
        if requests != (other.streams, other.marks, other.lost):
            return False
        if self.events != other.events and self._settled() != other._settled():
            return False
        if any(self.sizes_at(point) != other.sizes_at(point) for point in {*self.points} & {*other.points}):
            return False
        for point in other.points:
            if point not in self.points:
                self._take(other.sizes_at(point), point)
        self.whole += [point for point in other.whole if point not in self.whole]
        return True

    def _settled(self) -> list[int]:
        return settled(self.events, self.marks)

    def contradicts(self, other: Piece) -> bool:
        """Whether this piece holds a point that was simulated with few layers alone, and at which `other` was
        simulated with all of them."""
        return any(point in self.points and point not in self.whole for point in other.whole)

    def _take(self, sizes: Sequence[int], point: Point) -> None:
        """Add a point with the bytes of each allocation at it, and derive all expressions anew."""
        indices: dict[Any, int] = {}
        column_of: list[int] = []
        columns: list[tuple[int, ...]] = []  # by column, its bytes at every point
        known = [[column.at(p) for p in self.points] for column in self.columns]
        for before, size in zip(self.column_of, sizes, strict=True):
            column = before, size, (size.rule, size.arguments) if isinstance(size, Ruled) else None
            if column not in indices:
                indices[column] = len(columns)
                columns.append((*known[before], size))
            column_of.append(indices[column])
        self.points = [*self.points, point]
        explained = [explain(values, self.points) for values in columns]
        self.sure = all(sure for _, sure in explained)
        self.columns = [
            Listed(values, tuple(self.points)) if expression is None else expression
            for values, (expression, _) in zip(columns, explained, strict=True)
        ]
        self.column_of = column_of

    def knows(self, point: Point) -> bool:
        """Whether its sizes are exact at `point`, which was simulated or lies between simulated points."""
        return self._spans(self.points, point)

    def knows_whole(self, point: Point) -> bool:
        """Like `knows`, by simulations with all layers alone."""
        return self._spans(self.whole, point)

    def _spans(self, points: Sequence[Point], point: Point) -> bool:
        """Whether `point` is one of `points`, or lies between them where the expressions are exact."""
        if point in points:
            return True
        if not points:
            return False
        rows, tokens = zip(*points, strict=True)
        return (
            self.sure
            and self.explains
            and min(rows) <= point.micro_batch_size <= max(rows)
            and min(tokens) <= point.seq_len <= max(tokens)
            and (min(tokens) == max(tokens) or point.seq_len % self.sequence_step == 0)
            and self._has_sizes_at(point)
        )

    def _has_sizes_at(self, point: Point) -> bool:
        """Whether every expression is a whole number of bytes at `point`; where one is not, it is wrong."""
        try:
            return bool(self.sizes_at(point))
        except ValueError:
            return False

    def distance(self, point: Point) -> float:
        """How far the nearest simulated point lies from `point`: the sum of both ratios in powers of two."""
        return min(
            abs(log2(point.micro_batch_size / rows)) + abs(log2(point.seq_len / tokens))
            for rows, tokens in self.points
        )

    def may_hold(self, point: Point) -> bool:
        """Whether its expressions may hold at `point`. They do not for a micro batch size or sequence length
        that was the same at all simulated points: it may be hidden in any coefficient."""
        rows, tokens = (set(sizes) for sizes in zip(*self.points, strict=True))
        return (
            self.explains
            and (len(rows) > 1 or point.micro_batch_size in rows)
            and (len(tokens) > 1 or point.seq_len in tokens)
        )

    @property
    def explains(self) -> bool:
        """Whether it has expressions that say anything of points where it was not simulated."""
        return len(self.points) > 1 and not any(isinstance(size, Listed) for size in self.columns)

    @property
    def sequence_step(self) -> int:
        """The largest power of two that divides every simulated sequence length, in tokens. The expressions
        are exact for its multiples alone: kernels pad, and which of them runs may depend on divisibility."""
        bits = 0
        for point in self.points:
            bits |= point.seq_len
        return bits & -bits

    def sizes_at(self, point: Point) -> list[int]:
        """The bytes of each allocation at `point`. Raises ValueError where one is not known, or is none: far
        from where it was seen an expression may come to nothing, and nothing is not allocated."""
        sizes = [size.at(point) for size in self.columns]
        if min(sizes, default=1) <= 0:
            raise ValueError(f"an allocation of {min(sizes)} bytes at {point}")
        return [sizes[column] for column in self.column_of]

    def at(self, point: Point) -> RequestLog:
        """The log of requests at `point`. Raises ValueError where a size is not known."""
        sizes = self.sizes_at(point)
        log = RequestLog()
        events = log.events
        births = 0
        for event in self.events:
            if event == BIRTH:
                events.append((births, sizes[births], self.streams[births]))
                births += 1
            else:
                events.append((event, DIED, 0))
        log.marks, log.lost = self.marks, frozenset(self.lost)
        return log

    def as_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back. A free is counted back from the latest allocation, so that
        equal layers become equal numbers, which compress well."""
        births, events = 0, list[int]()
        for event in self.events:
            events.append(0 if event == BIRTH else births - event)
            births += event == BIRTH
        return {
            "points": self.points,
            "sure": self.sure,
            "events": events,
            "columns": [
                {"listed": size.values} if isinstance(size, Listed) else to_json(size)
                for size in self.columns
            ],
            "column_of": self.column_of,
            "streams": {n: stream for n, stream in enumerate(self.streams) if stream},
            "marks": self.marks,
            "lost": self.lost,
            "labels": self.labels,
            "label_of": self.label_of,
            "whole": self.whole,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Piece:
        """What `as_json` wrote."""
        points = [Point(*point) for point in document["points"]]
        births, events = 0, list[int]()
        for back in document["events"]:
            events.append(births - back if back else BIRTH)
            births += not back
        streams = [0] * births
        for n, stream in document["streams"].items():
            streams[int(n)] = stream
        seen = tuple(points)
        written: list[Any] = document["columns"]
        columns: list[Size] = [
            Listed(tuple(size["listed"]), seen) if "listed" in size else from_json(size) for size in written
        ]
        marks = [Mark(*mark) for mark in document["marks"]]
        return cls(
            points,
            events,
            streams,
            marks,
            document["lost"],
            document["column_of"],
            columns,
            document["sure"],
            [Label(*label) for label in document["labels"]],
            document["label_of"],
            [Point(*point) for point in document.get("whole", points)],
        )
