"""Micro batches that only repeat the one before them are not simulated: their memory and time are added."""

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
"""So many micro batches are simulated at least: the first makes gradients, those after it add to them."""


def in_short(
    training: Training, recipe: Recipe, memory: SimulatedMemory, clocks: Sequence[SimulatedTime]
) -> Training:
    """`training`, of which only the micro batches of a step that differ are simulated, and the last."""
    if recipe.packs_by_lengths:
        return training
    return dataclasses.replace(training, repeats=_MicroBatches(memory, clocks).repeats)


class _State(NamedTuple):
    """The state of the simulation between two micro batches."""

    event: int
    """The index of the log's next event."""
    numbers: list[dict[Path, float]]
    """The moments and counters of each clock."""


class _MicroBatches:
    """Watches the micro batches of a step until one does what the one before it did."""

    def __init__(self, memory: SimulatedMemory, clocks: Sequence[SimulatedTime]) -> None:
        self.memory, self.clocks = memory, clocks
        self.states: list[_State] = []
        """The states before each micro batch of this step that was simulated, and after the last of them."""
        self.requests: list[Event] | None = None
        """The requests of each micro batch that only repeats another; None where none is known to."""

    def repeats(self, n: int, of: int) -> bool:
        """Whether micro batch `n` of `of` need not be simulated: see Training.repeats. The clocks go on as if
        all but the last had been simulated, and the allocator gets the requests of each of them."""
        if of <= FEWEST + 1 or n == of:
            return False
        if n == 1:
            self.states, self.requests = [], None
        if self.requests is None:
            state = _State(len(self.memory.log.events), [clock.numbers() for clock in self.clocks])
            self.states.append(state)
            self.requests = self._steady() if n > FEWEST else None
            if self.requests is None:
                return False
            for clock, added in zip(self.clocks, self._added(-2, -1), strict=True):
                clock.advance(added, of - n)
        self.memory.ask_again(self.requests)
        return True

    def _steady(self) -> list[Event] | None:
        """The requests of the last micro batch, if those that follow can only repeat it; else None. That is
        so if it made the same requests as the one before it and took as long, and freed everything that it
        allocated, and nothing else, but for its loss."""
        before, between, after = self.states[-3:]
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
        """What was added to the numbers of each clock between two states, by their index in `states`."""
        return [
            {path: after[path] - before[path] for path in after if path in before}
            for before, after in zip(self.states[first].numbers, self.states[last].numbers, strict=True)
        ]


def _same(one: Mapping[Path, float], other: Mapping[Path, float]) -> bool:
    """Whether the numbers that both have are equal, but for rounding."""
    return all(
        math.isclose(added, other[path], rel_tol=1e-9, abs_tol=1e-12)
        for path, added in one.items()
        if path in other
    )
