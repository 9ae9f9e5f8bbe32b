"""The requests of a deep model, from those of the same model with few layers.

One layer more does what the one before it did: in a few places of the log, once in forward, in backward and
in each list of the optimizer, the same requests stand once more. Two logs show where. What dies there was
born in the same layer, in one a fixed number of layers away, in the one that mirrors it (backward goes
through them in the other order), or outside of them all: three logs show which. Nothing here knows what a
layer is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

from harness.formula.request_log import DIED, Mark, RequestLog

OUTSIDE = -1
"""In the place of a run's number."""
WINDOWS = (24, 12, 6, 3)
"""Items that must be the same behind an insertion: fewer where a size that depends on the depth follows."""

Item = tuple[Any, ...]
"""`born` or `died` with its bytes and stream, or a mark's two words."""


class NotRepeated(ValueError):
    """The logs do not differ by repetitions alone."""


@dataclass
class _Walk:
    """Events and marks of a log, in one order."""

    items: list[Item] = field(default_factory=list[Item])
    births: list[int] = field(default_factory=list[int])
    """For each death, the position of its birth; -1 for everything else."""
    sizes: list[int] = field(default_factory=list[int])
    """For each birth what was requested, with its rule; 0 for everything else."""
    keys: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, log: RequestLog) -> _Walk:
        walk, born, marks = cls(), dict[int, int](), iter([*log.marks, Mark(-1, "step")])
        mark = next(marks)
        for n in range(len(log.events) + 1):
            while mark.at == n:
                walk._add((mark.what, mark.phase))
                mark = next(marks)
            if n == len(log.events):
                break
            key, size, stream = log.events[n]
            if size == DIED:
                birth = born.pop(key)
                walk._add(("died", *walk.items[birth][1:]), birth)
            else:
                born[key] = len(walk.items)
                walk._add(("born", int(size), stream), size=size, key=key)
        return walk

    def _add(self, item: Item, birth: int = -1, size: int = 0, key: int = 0) -> None:
        self.items.append(item)
        self.births.append(birth)
        self.sizes.append(size)
        self.keys.append(key)

    def order(self) -> tuple[list[tuple[Any, ...]], list[int]]:
        """What happens, whatever the sizes."""
        return [(item[0], item[-1]) for item in self.items], self.births


class _Run(NamedTuple):
    """Items that stand one after the other in equal copies, one more for each layer more."""

    start: int
    length: int
    copies: int
    """In the log with the fewest layers."""


class _Place(NamedTuple):
    """An item of a log of any depth."""

    run: int
    copy: int
    offset: int
    """Within the copy; OUTSIDE of runs, the item's position in the log with the fewest layers."""


class _Rule(NamedTuple):
    """Which copy of a run something was born in that dies in copy `c` of `n`, where the run has `m`."""

    run: int
    offset: int
    counted: Literal["first", "last", "along", "back"]
    number: int

    def copy(self, c: int, m: int) -> int:
        forms = {"first": 0, "last": m - 1, "along": c, "back": m - 1 - c}
        return forms[self.counted] + self.number


class RepeatedLayers:
    """Made of three logs of the same step, each of a model that is as many layers deeper than the one before.

    Raises NotRepeated where what it derives from the first two is not the third.
    """

    def __init__(self, logs: Sequence[RequestLog]) -> None:
        if any(log.lost for log in logs):
            raise NotRepeated("each step loses memory")
        walks = [_Walk.of(log) for log in logs]
        self._fewest = walks[0]
        inserted, self._growing = _compared(walks[0], walks[1])
        self._runs = _runs(walks[0].items, inserted)
        self._rules: dict[tuple[int, int], _Rules] = {}
        self._known: dict[int, list[tuple[int, int]]] = {}
        """By how much deeper: see `_every`."""
        self._derive(walks)
        derived = _Walk.of(self.at(2, logs[0], logs[1])[0])
        if (derived.items, derived.births) != (walks[2].items, walks[2].births):
            raise NotRepeated("the deepest of the three does something else")

    @property
    def grows(self) -> bool:
        """Whether a size depends on the number of layers."""
        return bool(self._growing)

    def describes(self, log: RequestLog) -> bool:
        """Whether `log`, with the fewest layers and other sizes, does the same in the same order."""
        return _Walk.of(log).order() == self._fewest.order()

    def at(self, times: int, fewest: RequestLog, more: RequestLog) -> tuple[RequestLog, dict[int, int]]:
        """The log of a model that is `times` as much deeper than the one of `fewest` as that of `more` is, at
        the sizes of these two; and for each key in it one in `fewest` that the same is said of."""
        walk, other = _Walk.of(fewest), _Walk.of(more)
        log, alike = RequestLog(), dict[int, int]()
        if times not in self._known:
            self._known[times] = self._every(times)
        for n, (source, birth) in enumerate(self._known[times]):
            what, *rest = walk.items[source]
            if what == "born":
                size = walk.sizes[source]
                if source in self._growing:
                    size += times * (other.sizes[self._growing[source]] - size)
                log.born(n, size, rest[1])
                alike[n] = walk.keys[source]
            elif what == "died":
                log.died(birth)
            else:
                log.mark(what, *rest)
        return log, alike

    def _every(self, times: int) -> list[tuple[int, int]]:
        """For each item its position in the log with the fewest layers; and of a death, that of its birth."""
        places = [*self._places(times)]
        positions = {place: n for n, place in enumerate(places)}
        sources = [self._source(place, times) for place in places]
        dies = [birth >= 0 for birth in self._fewest.births]
        return [
            (source, positions[self._birth(place, times)] if dies[source] else -1)
            for place, source in zip(places, sources, strict=True)
        ]

    def _copies(self, run: int, times: int) -> int:
        return self._runs[run].copies + times if run != OUTSIDE else 1

    def _places(self, times: int) -> Iterator[_Place]:
        """Every item of a log that is `times` deeper, in order."""
        position = 0
        for number, run in enumerate(self._runs):
            yield from (_Place(OUTSIDE, 0, n) for n in range(position, run.start))
            for copy in range(run.copies + times):
                yield from (_Place(number, copy, offset) for offset in range(run.length))
            position = run.start + run.length * run.copies
        yield from (_Place(OUTSIDE, 0, n) for n in range(position, len(self._fewest.items)))

    def _source(self, place: _Place, times: int) -> int:
        """The position of the same item in the log with the fewest layers: one in the middle for those in the
        middle, since the first and the last layer may hold what others do not."""
        if place.run == OUTSIDE:
            return place.offset
        run = self._runs[place.run]
        is_last = place.copy == run.copies + times - 1
        copy = run.copies - 1 if is_last else min(place.copy, max(0, run.copies - 2))
        return run.start + copy * run.length + place.offset

    def _birth(self, place: _Place, times: int) -> _Place:
        """Where that was born which dies at `place`."""
        rule = self._rules[place.run, place.offset].at(place.copy, self._copies(place.run, times))
        copy = rule.copy(place.copy, self._copies(rule.run, times)) if rule.run != OUTSIDE else 0
        return _Place(rule.run, copy, rule.offset)

    def _derive(self, walks: Sequence[_Walk]) -> None:
        """The rule of every death, which holds in all logs."""
        seen: dict[tuple[int, int], list[_Seen]] = defaultdict(list)
        for times, walk in enumerate(walks):
            places = [*self._places(times)]
            if len(places) != len(walk.items):
                raise NotRepeated("one layer more adds other requests")
            for place, birth in zip(places, walk.births, strict=True):
                if birth >= 0:
                    born = places[birth]
                    copies = self._copies(place.run, times), self._copies(born.run, times)
                    seen[place.run, place.offset].append(_Seen(place.copy, copies[0], born, copies[1]))
        for (run, offset), found in seen.items():
            self._rules[run, offset] = _rules(found, self._copies(run, 0))


class _Seen(NamedTuple):
    """A death in a log: in copy `copy` of `copies`, of what was born in a run of `born_copies`."""

    copy: int
    copies: int
    born: _Place
    born_copies: int


class _Rules(NamedTuple):
    """Those of one item of a run: the first copies and the last may have their own."""

    first: int
    last: int
    rules: dict[tuple[str, int], _Rule]

    def at(self, copy: int, copies: int) -> _Rule:
        return self.rules[_part(copy, copies, self.first, self.last)]


def _part(copy: int, copies: int, first: int, last: int) -> tuple[str, int]:
    if copy < first:
        return "first", copy
    return ("last", copies - copy) if copies - copy <= last else ("middle", 0)


def _rules(seen: Sequence[_Seen], copies: int) -> _Rules:
    """With as few exceptions as possible. Raises NotRepeated where there are too many of them."""
    for first, last in sorted(product(range(copies), repeat=2), key=sum):
        parts: dict[tuple[str, int], list[_Seen]] = defaultdict(list)
        for each in seen:
            parts[_part(each.copy, each.copies, first, last)].append(each)
        rules = {part: _rule(found) for part, found in parts.items()}
        if first + last <= copies and None not in rules.values():
            return _Rules(first, last, {part: rule for part, rule in rules.items() if rule is not None})
    raise NotRepeated("what dies was not born in a layer that its own place tells")


def _rule(seen: Sequence[_Seen]) -> _Rule | None:
    """The one that holds for all of these, if there is one."""
    numbers = {
        "first": {each.born.copy for each in seen},
        "last": {each.born.copy - (each.born_copies - 1) for each in seen},
        "along": {each.born.copy - each.copy for each in seen},
        "back": {each.born.copy - (each.born_copies - 1 - each.copy) for each in seen},
    }
    births = {(each.born.run, each.born.offset) for each in seen}
    counted = next((form for form, found in numbers.items() if len(found) == 1), None)
    if len(births) > 1 or counted is None:
        return None
    return _Rule(*births.pop(), counted, numbers[counted].pop())  # type: ignore[arg-type]


def _compared(fewer: _Walk, more: _Walk) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Behind which positions of `fewer` there is how much more in `more`, each the same as what is before it;
    and the positions in both of births whose size depends on the depth."""
    sizes = [{item[1] for item in walk.items if len(item) == 3} for walk in (fewer, more)]
    common = sizes[0] & sizes[1]
    a, b = (
        [item if len(item) < 3 or item[1] in common else (item[0], None, item[2]) for item in walk.items]
        for walk in (fewer, more)
    )
    windows = [_windows(b, width) for width in WINDOWS]
    inserted: list[tuple[int, int]] = []
    growing: dict[int, int] = {}
    n = m = 0
    while n < len(a) or m < len(b):
        if n < len(a) and m < len(b) and a[n] == b[m]:
            if a[n][:2] == ("born", None):
                growing[n] = m
            n, m = n + 1, m + 1
            continue
        length = _insertion(a, b, windows, n, m)
        inserted.append((n, length))
        m += length
    return inserted, growing


def _windows(items: Sequence[Item], width: int) -> dict[tuple[Item, ...], list[int]]:
    found: dict[tuple[Item, ...], list[int]] = defaultdict(list)
    for n in range(len(items)):
        found[tuple(items[n : n + width])].append(n)
    return found


def _insertion(
    a: Sequence[Item], b: Sequence[Item], windows: Sequence[dict[tuple[Item, ...], list[int]]], n: int, m: int
) -> int:
    """How many items are inserted at `m` of `b`, behind which `a` goes on at `n`: as those before."""
    for width, found in zip(WINDOWS, windows, strict=True):
        for at in [len(b)] if n == len(a) else found.get(tuple(a[n : n + width]), ()):
            if 0 < (length := at - m) <= m and b[m:at] == b[m - length : m]:
                return length
    raise NotRepeated("one layer more does something else")


def _runs(items: Sequence[Item], inserted: Sequence[tuple[int, int]]) -> list[_Run]:
    """Each insertion with the copies that stand before it already."""
    found: list[_Run] = []
    end = 0
    for at, length in inserted:
        copies = 0
        while (
            at - (copies + 1) * length >= end
            and items[at - (copies + 1) * length : at - copies * length] == items[at - length : at]
        ):
            copies += 1
        if not copies:
            raise NotRepeated("what is repeated is not there once")
        found.append(_Run(at - copies * length, length, copies))
        end = at
    return found
