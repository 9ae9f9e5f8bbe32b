"""Micro batches that only repeat the one before them: a simulation counts these, and sees the others."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.formula import DIED, Event
from harness.recipe import Recipe
from harness.simulate.clock import Path, SimulatedTime
from harness.simulate.memory import SimulatedMemory
from harness.training import Training

FEWEST = 3
"""That are seen before the rest is counted: the first makes gradients, and those after it add to them."""


def in_short(
    training: Training, recipe: Recipe, memory: SimulatedMemory, clocks: Sequence[SimulatedTime]
) -> Training:
    """`training` for a simulation, which sees those micro batches of a step that differ, and the last."""
    if recipe.packs_by_lengths:
        return training
    return dataclasses.replace(training, repeats=_MicroBatches(memory, clocks).repeats)


class _Seen(NamedTuple):
    """What is there between two micro batches."""

    event: int
    """The log's next."""
    numbers: list[dict[Path, float]]
    """Of each clock."""


class _MicroBatches:
    """Watches the micro batches of a step until one does what the one before it did."""

    def __init__(self, memory: SimulatedMemory, clocks: Sequence[SimulatedTime]) -> None:
        self.memory, self.clocks = memory, clocks
        self.seen: list[_Seen] = []
        """Before each micro batch of this step that was walked through, and after the last of them."""
        self.again: list[Event] | None = None
        """What each of the others asks for."""

    def repeats(self, n: int, of: int) -> bool:
        """See Training.repeats. The clocks go on as if all but the last had been walked through, and the
        allocator is asked for what each of them asks for."""
        if of <= FEWEST + 1 or n == of:
            return False
        if n == 1:
            self.seen, self.again = [], None
        if self.again is None:
            self.seen.append(_Seen(len(self.memory.log.events), [clock.numbers() for clock in self.clocks]))
            self.again = self._steady() if n > FEWEST else None
            if self.again is None:
                return False
            for clock, added in zip(self.clocks, self._added(-2, -1), strict=True):
                clock.advance(added, of - n)
        self.memory.ask_again(self.again)
        return True

    def _steady(self) -> list[Event] | None:
        """What the last micro batch asked for, if it asked for what the one before it did and took as long,
        freed what it made and nothing else, and left its loss alone. None if not."""
        before, between, after = self.seen[-3:]
        events = self.memory.log.events
        last = events[between.event : after.event]
        sizes = [(size, stream) for _, size, stream in last]
        if sizes != [(size, stream) for _, size, stream in events[before.event : between.event]]:
            return None
        born, died = ({key for key, size, _ in last if (size == DIED) == dies} for dies in (False, True))
        if not died <= born or len(born - died) != 1:
            return None
        pairs = zip(self._added(-3, -2), self._added(-2, -1), strict=True)
        return last if all(_same(*added) for added in pairs) else None

    def _added(self, first: int, last: int) -> list[dict[Path, float]]:
        return [
            {path: after[path] - before[path] for path in after if path in before}
            for before, after in zip(self.seen[first].numbers, self.seen[last].numbers, strict=True)
        ]


def _same(one: Mapping[Path, float], other: Mapping[Path, float]) -> bool:
    return all(
        math.isclose(added, other[path], rel_tol=1e-9, abs_tol=1e-12)
        for path, added in one.items()
        if path in other
    )
