"""A piece of a formula: the requests of a step wherever they are the same but for their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

from harness.formula.expression import Expression, Point, explain, from_json, to_json
from harness.formula.request_log import DIED, Label, Mark, RequestLog
from harness.formula.scratch import Ruled

BIRTH = -1
"""Among the events of a piece; any other number is the birth, counted from 0, that dies."""


@dataclass(frozen=True)
class Listed:
    """A size that nothing explains: what it was at the points where it was seen."""

    values: tuple[int, ...]
    points: tuple[Point, ...]

    def at(self, point: Point) -> int:
        """Raises ValueError elsewhere."""
        return self.values[self.points.index(point)]

    def __str__(self) -> str:
        return "not known but where it was seen"


Size = Expression | Listed


@dataclass
class Piece:
    """One order of births and deaths, and the size of each birth as an expression."""

    points: list[Point]
    """Where it was simulated."""
    events: list[int]
    streams: list[int]
    """Of each birth."""
    marks: list[Mark]
    lost: list[int]
    """Births that are never freed."""
    column_of: list[int]
    """Of each birth."""
    columns: list[Size]
    sure: bool = False
    """Every expression was found from fewer points than it explains."""
    labels: list[Label] = field(default_factory=list[Label])
    """What the births of the recorded step are, and what was there before, each once."""
    label_of: list[int] = field(default_factory=list[int])
    """Of each birth; -1 where nobody says."""
    whole: list[Point] = field(default_factory=list[Point])
    """Those of the points at which the model was simulated with all of its layers (fit/few_layers.py)."""

    @classmethod
    def of(
        cls, log: RequestLog, point: Point, labels: Mapping[int, Label] | None = None, *, whole: bool = True
    ) -> Piece:
        """What one simulation shows: it knows that point alone. `labels`: by key."""
        numbers: dict[int, int] = {}
        events: list[int] = []
        for key, size_bytes, _ in log.events:
            if size_bytes == DIED:
                events.append(numbers[key])
            else:
                numbers[key] = len(numbers)
                events.append(BIRTH)
        born = [(size, stream) for _, size, stream in log.events if size != DIED]
        piece = cls(
            [],
            events,
            [stream for _, stream in born],
            log.marks,
            sorted(numbers[key] for key in log.lost),
            [0] * len(born),
            [Listed((), ())],
        )
        piece._take([size for size, _ in born], point)
        each = {label: n for n, label in enumerate(dict.fromkeys((labels or {}).values()))}
        piece.labels = list(each)
        piece.label_of = [each[labels[key]] if labels and key in labels else -1 for key in numbers]
        piece.whole = [point] * whole
        return piece

    def add(self, other: Piece) -> bool:
        """Explain what other simulations show as well. False, and nothing changed, if they did something
        else."""
        mine = self.events, self.streams, self.marks, self.lost
        if mine != (other.events, other.streams, other.marks, other.lost):
            return False
        if any(self.sizes_at(point) != other.sizes_at(point) for point in {*self.points} & {*other.points}):
            return False
        for point in other.points:
            if point not in self.points:
                self._take(other.sizes_at(point), point)
        self.whole += [point for point in other.whole if point not in self.whole]
        return True

    def contradicts(self, other: Piece) -> bool:
        """Whether few layers said something of a point at which all of them do something else (`other`)."""
        return any(point in self.points and point not in self.whole for point in other.whole)

    def _take(self, sizes: Sequence[int], point: Point) -> None:
        """One more point, with the size of each birth at it."""
        numbers: dict[Any, int] = {}
        chosen: list[int] = []
        values: list[tuple[int, ...]] = []
        known = [[column.at(p) for p in self.points] for column in self.columns]
        for before, size in zip(self.column_of, sizes, strict=True):
            what = before, size, (size.rule, size.arguments) if isinstance(size, Ruled) else None
            if what not in numbers:
                numbers[what] = len(values)
                values.append((*known[before], size))
            chosen.append(numbers[what])
        self.points = [*self.points, point]
        explained = [explain(column, self.points) for column in values]
        self.sure = all(sure for _, sure in explained)
        self.columns = [
            Listed(column, tuple(self.points)) if found is None else found
            for column, (found, _) in zip(values, explained, strict=True)
        ]
        self.column_of = chosen

    def knows(self, point: Point) -> bool:
        """Whether what it says there is exact: it was simulated there, or between such points."""
        return self._spans(self.points, point)

    def knows_whole(self, point: Point) -> bool:
        """The same of simulations with all layers."""
        return self._spans(self.whole, point)

    def _spans(self, points: Sequence[Point], point: Point) -> bool:
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
        """Whether its expressions are whole numbers of bytes there: they are wrong where one is not."""
        try:
            return bool(self.sizes_at(point))
        except ValueError:
            return False

    def distance(self, point: Point) -> float:
        """How far the nearest of its points lies from `point`, in powers of two."""
        return min(
            abs(log2(point.micro_batch_size / rows)) + abs(log2(point.seq_len / tokens))
            for rows, tokens in self.points
        )

    def may_hold(self, point: Point) -> bool:
        """Whether it explains sizes of that kind: a size that never differed where it was derived may be
        anywhere in them."""
        rows, tokens = (set(sizes) for sizes in zip(*self.points, strict=True))
        return (
            self.explains
            and (len(rows) > 1 or point.micro_batch_size in rows)
            and (len(tokens) > 1 or point.seq_len in tokens)
        )

    @property
    def explains(self) -> bool:
        """Whether it says anything anywhere else than where it was seen."""
        return len(self.points) > 1 and not any(isinstance(size, Listed) for size in self.columns)

    @property
    def sequence_step(self) -> int:
        """The largest power of two that all sequences it was derived at are multiples of: kernels pad, and
        which of them runs may depend on it."""
        together = 0
        for point in self.points:
            together |= point.seq_len
        return together & -together

    def sizes_at(self, point: Point) -> list[int]:
        """Bytes of each birth. Raises ValueError where one is not known."""
        sizes = [size.at(point) for size in self.columns]
        return [sizes[column] for column in self.column_of]

    def at(self, point: Point) -> RequestLog:
        """The requests at that point. Raises ValueError where a size is not known."""
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
        """Plain data that `from_json` reads back. Deaths are counted back from the latest birth, so that the
        same layers read the same."""
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
