"""The largest micro batch or sequence that fits, found by simulating and not by arithmetic.

A few simulations make a formula (harness/formula), which says where the end is; what is there is simulated.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.fit.search import LARGEST, MULTIPLES, FitField
from harness.fit.simulations import Simulations
from harness.recipe import Recipe, check_recipe
from harness.step_profile import StepProfile

MOST_GUESSES = 8
"""Tries that go where the end seems to be; then the interval is halved."""
MOST_BEYOND = 3
"""Tries with other allocator settings."""


@dataclass
class ExactFit:
    """What was found, and the simulations that show it."""

    field: FitField
    multiple_of: int
    value: int | None = None
    """The largest value that fits; None: not even the smallest does."""
    profile: StepProfile | None = None
    """Of that value."""
    next_value: int | None = None
    """The next larger one, which does not fit or is not possible."""
    next_profile: StepProfile | None = None
    """Out of memory at the next value, simulated or as the formula says; None for a `limit`."""
    limit: str | None = None
    """Why there is nothing beyond the largest value, where memory is not the reason."""
    one_more_bytes: int | None = None
    """What one step more of the field takes at the peak, by the formula; None where nobody knows."""
    tried: dict[int, bool] = dataclasses.field(default_factory=dict[int, bool])
    """Every value that the answer rests on, in order, and whether it fits."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain data, without the profiles."""
        oom = self.next_profile.oom if self.next_profile is not None else None
        memory = self.profile.memory if self.profile is not None else None
        return {
            "field": self.field,
            "multiple_of": self.multiple_of,
            "largest": self.value,
            "peak_allocated_bytes": memory and memory.peak_allocated_bytes,
            "peak_reserved_bytes": memory and memory.peak_reserved_bytes,
            "host_bytes": memory and memory.host_bytes,
            "next": self.next_value,
            "next_out_of_memory_in": oom and oom.phase,
            "next_impossible": self.limit,
            "one_more_bytes": self.one_more_bytes,
            "tokens_per_s": self.profile and self.profile.step.tokens_per_s,
            "step_parts_s": self.profile and self.profile.parts_of_time_s(),
            "tried": {str(value): fits for value, fits in self.tried.items()},
        }


def fit_exact(
    recipe: Recipe,
    simulations: Simulations,
    field: FitField = "micro_batch_size",
    *,
    multiple_of: int | None = None,
    told: Callable[[int, bool], None] = lambda value, fits: None,
) -> ExactFit:
    """Search for the largest value of `field`, a multiple of `multiple_of`, that fits.

    It was simulated to fit, or lies between sizes that were and whose formula is exact there. The next one
    does not fit: it was simulated, or the same formula says so. `told` hears each outcome. Raises InputError
    for a recipe that cannot be simulated, and NotRepeated as Simulations.confirm does.
    """
    return _Search(recipe, simulations, field, multiple_of or MULTIPLES[field], told).largest()


def fits_beyond(
    recipe: Recipe,
    simulations: Simulations,
    known: ExactFit,
    told: Callable[[int, bool], None] = lambda value, fits: None,
) -> ExactFit:
    """A larger value than the one `known`, which other allocator settings gave, that fits with these.

    A few tries at the most. The value is None if none of them fits.
    """
    return _Search(recipe, simulations, known.field, known.multiple_of, told).beyond(known)


def fits_at_least(recipe: Recipe, simulations: Simulations) -> int:
    """A micro batch that is seen to fit, by two simulations: the recipe's own, or one a little before where
    the end seems to be from there. 0: not even that fits. Raises InputError for what cannot be simulated."""
    search = _Search(recipe, simulations, "micro_batch_size", 1, lambda value, fits: None)
    search.look_near_the_end()
    return search.low


class _Search:
    """Between the largest value that is seen to fit and the smallest that is seen not to. Both in units."""

    def __init__(
        self,
        recipe: Recipe,
        simulations: Simulations,
        field: FitField,
        unit: int,
        told: Callable[[int, bool], None],
    ) -> None:
        self.recipe, self.simulations, self.told = recipe, simulations, told
        self.found = ExactFit(field, unit)
        self.low, self.high = 0, LARGEST[field] // unit + 1
        """What is known to fit, and what is known not to, or is not looked for."""
        self.start = max(1, getattr(recipe, field) // unit)
        self._expected: dict[int, bool] = {}
        """By units: whether the formula says that they fit."""
        self._lost: dict[int, int] = {}
        """By units that do not fit: bytes that lie in pieces when memory runs out."""

    def largest(self) -> ExactFit:
        """The largest value that fits, and the next one that does not."""
        found, tried = self.found, self.start
        while self.high - self.low > 1:
            self._try(tried)
            if self._is_the_end():
                break
            tried = self._seen_before() or self._next(tried)
        if self.low:
            found.value = self.low * found.multiple_of
            largest = self._with(self.low)
            self.simulations.confirm(largest)
            self.simulations.time(largest)
            found.profile = self.simulations.profile(largest)
            here, after = (self.simulations.least_bytes(self._with(self.low + more)) for more in (0, 1))
            if here is not None and after is not None and not found.limit:
                found.one_more_bytes = after - here
        if found.next_value is None:
            found.limit = f"larger values than {LARGEST[found.field]} are not looked for"
        self.simulations.keep()
        return found

    def look_near_the_end(self) -> None:
        """Look at the recipe's own value and, if it fits, a little before where the end seems to be."""
        self._try(self.start)
        near = self._by_what_grows(self.start) * 7 // 8
        if self.low < near < self.high:
            self._try(near)
        self.simulations.keep()

    def beyond(self, known: ExactFit) -> ExactFit:
        """See fits_beyond."""
        self.low = (known.value or 0) // known.multiple_of
        first = self.low
        for _ in range(MOST_BEYOND):
            guess = self._seen_before() or self._end()
            if guess is None or guess <= self.low:
                break
            self._try(guess)
        if self.low > first:
            self.found.value = self.low * self.found.multiple_of
            self.found.profile = self.simulations.profile(self._with(self.low))
        self.simulations.keep()
        return self.found

    def _seen_before(self) -> int:
        """The fewest units between low and high that an earlier search has simulated; 0 if there are none.
        In this order an answer does not depend on what was simulated beyond it, which may fit again."""
        values = self.simulations.simulated_before(self.recipe, self.found.field)
        units = [value // self.found.multiple_of for value in values if value % self.found.multiple_of == 0]
        return min((n for n in units if self.low < n < self.high), default=0)

    def _with(self, units: int) -> Recipe:
        return self.recipe.model_copy(update={self.found.field: units * self.found.multiple_of})

    def _try(self, units: int) -> None:
        """Look at so many units, and note what it shows."""
        found, value = self.found, units * self.found.multiple_of
        profile = self._profile(value)
        fits = profile is not None and profile.oom is None
        found.tried[value] = fits
        self.told(value, fits)
        self._expected[units] = fits
        if fits:
            self.low = units
        else:
            self.high, found.next_value, found.next_profile = units, value, profile
            found.limit = found.limit if profile is None else None

    def _profile(self, value: int) -> StepProfile | None:
        """The profile with that value; None if it cannot be (the reason goes to found.limit)."""
        try:
            recipe = check_recipe({**self.recipe.model_dump(), self.found.field: value}, "fit")
            return self.simulations.profile(recipe)
        except InputError as error:
            if value <= getattr(self.recipe, self.found.field):
                raise  # the recipe itself cannot be simulated
            self.found.limit = str(error)
            return None

    def _is_the_end(self) -> bool:
        """Whether the formula of what fits says that one unit more does not."""
        if not self.low or self.high - self.low == 1 or self.found.next_value is not None:
            return False
        after = self.low + 1
        if not self.simulations.explains(self._with(self.low)) or self._fits(after) is not False:
            return False
        self.found.next_profile = self.simulations.expected(self._with(after))
        self.high, self.found.next_value = after, self.found.multiple_of * after
        self.found.tried[self.found.next_value] = False
        self.told(self.found.next_value, False)
        return True

    def _next(self, tried: int) -> int:
        """What to try next, in units, between low and high."""
        low, high, found = self.low, self.high, self.found
        impossible = found.next_value is not None and found.next_profile is None
        if impossible or len(found.tried) > MOST_GUESSES:
            return low + max(1, (high - low) // 2)
        end = self._end()
        if end is None:
            end = self._by_what_grows(tried)
        # at the end already, as far as is known: one unit more shows it
        return min(max(end, low + 1), high - 1)

    def _by_what_grows(self, tried: int) -> int:
        """Where the end is if all that does not stay from step to step grows with the field."""
        recipe, simulations = self._with(tried), self.simulations
        kept = simulations.kept_bytes(recipe)
        grows = (simulations.least_bytes(recipe) or kept) - kept
        return tried * (simulations.hardware.memory_bytes - kept) // max(1, grows)

    def _end(self) -> int | None:
        """The most units between low and high of which the formula says that they fit; None without one."""
        most = self._most_within(0)
        if most is None:
            return None
        low, high = self.low, min(self.high, most + 1)
        guess, stride = most, 0
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            fits = self._fits(guess)
            if fits is None:
                return None
            if fits:
                low = guess
            else:
                high = guess
            if not stride:  # more than was allocated is needed: as much more as lay in pieces here
                guess, stride = self._most_within(self._lost.get(guess, 0)) or guess, 1
            else:
                guess, stride = guess + (stride if fits else -stride), stride * 2
        return low

    def _most_within(self, lost_bytes: int) -> int | None:
        """The most units, from low to below high, that need no more than there is besides what is lost, if
        nothing else is; None if no formula knows. Needs are nearly a straight line."""
        limit = self.simulations.hardware.memory_bytes - lost_bytes
        low, high = self.low, self.high
        units = max(self.low, 1) if self.found.tried else self.start
        seen: tuple[int, int] | None = None
        while high - low > 1:
            units = min(max(units, low + 1), high - 1)
            needed = self.simulations.least_bytes(self._with(units))
            if needed is None:
                return None
            if needed <= limit:
                low = units
            else:
                high = units
            if seen is None or needed == seen[1] or units == seen[0]:
                step = max(1, units // 8) if needed <= limit else -max(1, units // 8)
            else:
                slope = (needed - seen[1]) / (units - seen[0])
                step = int((limit - needed) // slope) if slope > 0 else high - units
            seen, units = (units, needed), units + step
        return low

    def _fits(self, units: int) -> bool | None:
        """As the formula says; None without one."""
        if units not in self._expected:
            profile = self.simulations.expected(self._with(units))
            if profile is None:
                return None
            self._expected[units] = profile.oom is None
            if profile.oom is not None:
                self._lost[units] = profile.oom.reserved_unallocated_bytes or 0
        return self._expected[units]
