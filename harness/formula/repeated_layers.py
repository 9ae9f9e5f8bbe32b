"""The requests of a deep model, from those of the same model with few layers.

A further layer repeats what the layer before it did: in a few places of the log (once in forward, once in
backward and once in each list of the optimizer) the same requests stand once more. Comparing two logs shows
where. What is freed there was allocated in the same layer, in a layer a fixed number of layers away, in the
layer that mirrors it (backward goes through the layers in reverse), or outside of all layers. Three logs show
which. Nothing here knows what a layer is. As in request_log.py, a birth is an allocation, a death a free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

from harness.formula.request_log import BIRTH, DIED, Mark, RequestLog, settled

OUTSIDE = -1
"""Stands where the number of a run would be, for an item that is in none."""
WINDOWS = (24, 12, 6, 3)
"""How many items behind an insertion must agree with those behind its place in the other log, the most first.
Fewer agree where an item with a size that depends on the depth follows soon."""

Item = tuple[Any, ...]
"""An item of a log: ("born" or "died", bytes, stream) for an event, (what, phase) for a mark."""


class NotRepeated(ValueError):
    """The logs of deeper models do not differ from the others by repetitions alone."""


@dataclass
class _Walk:
    """The events and marks of a log in one list. The lists have an entry for each item."""

    items: list[Item] = field(default_factory=list[Item])
    births: list[int] = field(default_factory=list[int])
    """For a free, the position of its allocation in `items`; -1 for every other item."""
    sizes: list[int] = field(default_factory=list[int])
    """For an allocation, the requested bytes with their rule (a Ruled); 0 for every other item."""
    keys: list[int] = field(default_factory=list[int])
    """For an allocation, its key in the log; 0 for every other item."""

    @classmethod
    def of(cls, log: RequestLog) -> _Walk:
        """The walk through a whole log."""
        walk, marks = cls(), iter([*log.marks, Mark(-1, "step")])
        mark, born = next(marks), list[int]()
        births = (event for event in log.events if event[1] != DIED)
        events = settled(log.numbered(), log.marks)
        for n in range(len(events) + 1):
            while mark.at == n:
                walk._add((mark.what, mark.phase))
                mark = next(marks)
            if n == len(events):
                break
            if events[n] == BIRTH:
                key, size, stream = next(births)
                born.append(len(walk.items))
                walk._add(("born", int(size), stream), size=size, key=key)
            else:
                birth = born[events[n]]
                walk._add(("died", *walk.items[birth][1:]), birth)
        return walk

    def _add(self, item: Item, birth: int = -1, size: int = 0, key: int = 0) -> None:
        self.items.append(item)
        self.births.append(birth)
        self.sizes.append(size)
        self.keys.append(key)

    def order(self) -> tuple[list[tuple[Any, ...]], list[int]]:
        """What happens in which order, without the sizes."""
        return [(item[0], item[-1]) for item in self.items], self.births


class _Run(NamedTuple):
    """Items that stand one after the other in equal copies. A deeper model has more copies of them."""

    start: int
    """The position of the first copy in the log with the fewest layers."""
    length: int
    """The number of items in one copy."""
    copies: int
    """The number of copies in the log with the fewest layers."""


class _Place(NamedTuple):
    """The place of an item in a log of any depth."""

    run: int
    """The number of its run, or OUTSIDE."""
    copy: int
    offset: int
    """The item's offset within the copy. OUTSIDE of runs, its position in the log with the fewest layers."""


class _Rule(NamedTuple):
    """Where the allocation is that is freed in copy `c` of one run: in a copy of a run of `m` copies."""

    run: int
    """The run of the allocation, or OUTSIDE."""
    offset: int
    counted: Literal["first", "last", "along", "back"]
    """From where its copy is counted: from the first, from the last, from `c`, or from the mirror of `c`."""
    number: int
    """How many copies after that it is."""

    def copy(self, c: int, m: int) -> int:
        forms = {"first": 0, "last": m - 1, "along": c, "back": m - 1 - c}
        return forms[self.counted] + self.number


class RepeatedLayers:
    """The log of a step at any depth, derived from `logs` of three models, each deeper than the one before by
    the same number of layers.

    Raises NotRepeated where the third log is not what follows from the first two.
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
        """The result of `_every` by its argument."""
        self._derive(walks)
        derived = _Walk.of(self.at(2, logs[0], logs[1])[0])
        if (derived.items, derived.births) != (walks[2].items, walks[2].births):
            raise NotRepeated("the deepest of the three does something else")

    @property
    def grows(self) -> bool:
        """Whether the size of any allocation depends on the number of layers."""
        return bool(self._growing)

    def describes(self, log: RequestLog) -> bool:
        """Whether `log`, of the fewest layers and of any sizes, makes the same requests in the same order."""
        return _Walk.of(log).order() == self._fewest.order()

    def at(self, times: int, fewest: RequestLog, more: RequestLog) -> tuple[RequestLog, dict[int, int]]:
        """The log of a model that is `times` as many layers deeper than that of `fewest` as `more` is.

        It has the batch and sequence of these two logs. Also returns, for each key in it, the key in `fewest`
        of the allocation that it repeats, which has the same label.
        """
        walk, deeper = _Walk.of(fewest), _Walk.of(more)
        log, origins = RequestLog(), dict[int, int]()
        if times not in self._known:
            self._known[times] = self._every(times)
        for n, (source, birth) in enumerate(self._known[times]):
            what, *rest = walk.items[source]
            if what == "born":
                size = walk.sizes[source]
                if source in self._growing:
                    size += times * (deeper.sizes[self._growing[source]] - size)
                log.born(n, size, rest[1])
                origins[n] = walk.keys[source]
            elif what == "died":
                log.died(birth)
            else:
                log.mark(what, *rest)
        return log, origins

    def _every(self, times: int) -> list[tuple[int, int]]:
        """For each item of a log that is `times` deeper: the position of the item that it repeats in the log
        with the fewest layers; and for a free the position of its allocation in the deeper log, else -1."""
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
        """The place of every item of a log that is `times` deeper, in order."""
        position = 0
        for number, run in enumerate(self._runs):
            yield from (_Place(OUTSIDE, 0, n) for n in range(position, run.start))
            for copy in range(run.copies + times):
                yield from (_Place(number, copy, offset) for offset in range(run.length))
            position = run.start + run.length * run.copies
        yield from (_Place(OUTSIDE, 0, n) for n in range(position, len(self._fewest.items)))

    def _source(self, place: _Place, times: int) -> int:
        """The position in the log with the fewest layers of the item that the one at `place` repeats. It is
        in a middle copy for a middle copy, since the first and the last layer may differ."""
        if place.run == OUTSIDE:
            return place.offset
        run = self._runs[place.run]
        is_last = place.copy == run.copies + times - 1
        copy = run.copies - 1 if is_last else min(place.copy, max(0, run.copies - 2))
        return run.start + copy * run.length + place.offset

    def _birth(self, place: _Place, times: int) -> _Place:
        """The place of the allocation that is freed at `place`."""
        rule = self._rules[place.run, place.offset].at(place.copy, self._copies(place.run, times))
        copy = rule.copy(place.copy, self._copies(rule.run, times)) if rule.run != OUTSIDE else 0
        return _Place(rule.run, copy, rule.offset)

    def _derive(self, walks: Sequence[_Walk]) -> None:
        """Find the rule of every free, which has to hold in all logs."""
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
    """A free that was seen in a log: in copy `copy` of a run of `copies`, of the allocation at `born`."""

    copy: int
    copies: int
    born: _Place
    born_copies: int
    """The number of copies of the run that `born` is in."""


class _Rules(NamedTuple):
    """The rules of a free that all copies of a run have: one for the middle copies, and exceptions."""

    first: int
    """How many copies at the beginning have a rule of their own each."""
    last: int
    """How many copies at the end have a rule of their own each."""
    rules: dict[tuple[str, int], _Rule]
    """By part, as `_part` names it."""

    def at(self, copy: int, copies: int) -> _Rule:
        return self.rules[_part(copy, copies, self.first, self.last)]


def _part(copy: int, copies: int, first: int, last: int) -> tuple[str, int]:
    """The part of a run that a copy is in: each of the `first` and of the `last` is one, the middle one."""
    if copy < first:
        return "first", copy
    return ("last", copies - copy) if copies - copy <= last else ("middle", 0)


def _rules(seen: Sequence[_Seen], copies: int) -> _Rules:
    """The rules that hold for all of `seen`, in a run that had `copies` in the log with the fewest layers,
    with as few exceptions as possible. Raises NotRepeated where more are needed than there are copies."""
    for first, last in sorted(product(range(copies + 1), repeat=2), key=sum):
        parts: dict[tuple[str, int], list[_Seen]] = defaultdict(list)
        for each in seen:
            parts[_part(each.copy, each.copies, first, last)].append(each)
        rules = {part: _rule(found) for part, found in parts.items()}
        if first + last <= copies and None not in rules.values():
            return _Rules(first, last, {part: rule for part, rule in rules.items() if rule is not None})
    raise NotRepeated("what dies was not born in a layer that its own place tells")


def _rule(seen: Sequence[_Seen]) -> _Rule | None:
    """The one rule that holds for all of `seen`; None if there is none."""
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
    """Where `more` has items that `fewer` has not, each insertion a repetition of the items before it.

    Returns (the position in `fewer` behind which items are inserted, their number) for each insertion, and
    the allocations whose size depends on the depth: position in `fewer` to position in `more`.
    """
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
    """Every sequence of `width` items, with the positions at which it begins."""
    found: dict[tuple[Item, ...], list[int]] = defaultdict(list)
    for n in range(len(items)):
        found[tuple(items[n : n + width])].append(n)
    return found


def _insertion(
    a: Sequence[Item], b: Sequence[Item], windows: Sequence[dict[tuple[Item, ...], list[int]]], n: int, m: int
) -> int:
    """How many items are inserted in `b` at position `m`, behind which it goes on like `a` at position `n`.
    They have to repeat the items before them. Raises NotRepeated where they do not."""
    for width, found in zip(WINDOWS, windows, strict=True):
        for at in [len(b)] if n == len(a) else found.get(tuple(a[n : n + width]), ()):
            if 0 < (length := at - m) <= m and b[m:at] == b[m - length : m]:
                return length
    raise NotRepeated("one layer more does something else")


def _runs(items: Sequence[Item], inserted: Sequence[tuple[int, int]]) -> list[_Run]:
    """A run for each insertion: the inserted items with the copies of them that stand before it already."""
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
