"""The largest micro batch or sequence that fits, found by simulating and not by arithmetic.

A few simulations make a formula (harness/formula), which says where the limit is; that is then simulated.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.fit.search import LARGEST, MULTIPLES, FitField
from harness.fit.simulations import Simulations
from harness.recipe import Recipe, check_recipe
from harness.step_profile import StepProfile, is_tight, spare_bytes

MOST_GUESSES = 8
"""How many values are tried where the formula expects the limit. After them the interval is halved."""
MOST_BEYOND = 3
"""The number of larger values that `fits_beyond` tries."""


@dataclass
class ExactFit:
    """The largest value of a recipe field that fits, and the simulations that show it."""

    field: FitField
    multiple_of: int
    """Only multiples of it were tried."""
    value: int | None = None
    """The largest value that fits; None if not even the smallest does."""
    profile: StepProfile | None = None
    """The step's profile with that value."""
    next_value: int | None = None
    """The next larger value, which does not fit or is not possible."""
    next_profile: StepProfile | None = None
    """The step's profile with the next value, out of memory, simulated or from the formula. None where
    `limit` is the reason."""
    limit: str | None = None
    """Why there is no larger value, where memory is not the reason."""
    one_more_bytes: int | None = None
    """What the next value takes more at the peak than the largest, by the formula; None if unknown."""
    tried: dict[int, bool] = dataclasses.field(default_factory=dict[int, bool])
    """Every value that was tried, in order, and whether it fits."""

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
            "spare_bytes": self.profile and spare_bytes(self.profile),
            "too_tight_to_call": self.profile and is_tight(self.profile),
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

    That value was simulated, or the formula of simulations around it is exact there. The next value does not
    fit, by a simulation or by the same formula. `told` is called with each value that is tried, and whether
    it fits. Raises InputError for a recipe that cannot be simulated, and NotRepeated as Simulations.confirm
    does.
    """
    return _Search(recipe, simulations, field, multiple_of or MULTIPLES[field], told).largest()


def fits_beyond(
    recipe: Recipe,
    simulations: Simulations,
    known: ExactFit,
    told: Callable[[int, bool], None] = lambda value, fits: None,
) -> ExactFit:
    """A value that fits with the allocator settings of `simulations`, and is larger than that of `known`,
    which other settings gave.

    It takes a few tries at most. The value is None if none of them fits.
    """
    return _Search(recipe, simulations, known.field, known.multiple_of, told).beyond(known)


def fits_at_least(recipe: Recipe, simulations: Simulations) -> int:
    """The largest micro batch size that fits of two that are simulated: the recipe's own, and one a little
    below where the limit then seems to be. 0 if neither fits. Raises InputError if it cannot be simulated."""
    search = _Search(recipe, simulations, "micro_batch_size", 1, lambda value, fits: None)
    search.try_near_the_limit()
    return search.low


class _Search:
    """A search between the largest value that fits and the smallest that does not.

    Inside, values are counted in units: a value is its units times ExactFit.multiple_of.
    """

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
        """The most units that are known to fit, and the fewest known not to (or beyond what is searched)."""
        self.start = max(1, getattr(recipe, field) // unit)
        """The recipe's own value in units."""
        self._expected: dict[int, bool] = {}
        """Whether the formula says that they fit, by units."""
        self._fragmented: dict[int, int] = {}
        """For units that do not fit: the bytes that were reserved and idle when memory ran out."""
        self._likely = 0
        """The units that seem to be the limit by the formula; 0 before it says anything."""

    def largest(self) -> ExactFit:
        """Find the largest value that fits, and the next one that does not."""
        found, units = self.found, self.start
        while self.high - self.low > 1:
            self._try(units)
            if self._is_the_limit():
                break
            units = self._simulated_before() or self._next(units)
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

    def try_near_the_limit(self) -> None:
        """Try the recipe's own value, and then one a little below where the limit seems to be."""
        self._try(self.start)
        near = self._by_what_grows(self.start) * 7 // 8
        if self.low < near < self.high:
            self._try(near)
        self.simulations.keep()

    def beyond(self, known: ExactFit) -> ExactFit:
        """Find a larger value than `known`: see fits_beyond."""
        self.low = (known.value or 0) // known.multiple_of
        first = self.low
        for _ in range(MOST_BEYOND):
            guess = self._simulated_before() or self._expected_limit()
            if guess is None or guess <= self.low:
                break
            self._try(guess)
        if self.low > first:
            self.found.value = self.low * self.found.multiple_of
            self.found.profile = self.simulations.profile(self._with(self.low))
        self.simulations.keep()
        return self.found

    def _simulated_before(self) -> int:
        """The fewest units between low and high that an earlier search has simulated; 0 if there are none.
        Taking the fewest first, an answer does not depend on larger values that may fit again by chance."""
        values = self.simulations.simulated_before(self.recipe, self.found.field)
        units = [value // self.found.multiple_of for value in values if value % self.found.multiple_of == 0]
        return min((n for n in units if self.low < n < self.high), default=0)

    def _with(self, units: int) -> Recipe:
        """The recipe with so many units."""
        return self.recipe.model_copy(update={self.found.field: units * self.found.multiple_of})

    def _try(self, units: int) -> None:
        """Simulate so many units unless the formula is exact there, and note whether they fit."""
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
        """The step's profile with that value. None if it is impossible, for the reason in found.limit."""
        try:
            recipe = check_recipe({**self.recipe.model_dump(), self.found.field: value}, "fit")
            if value == self._likely * self.found.multiple_of:
                self.simulations.confirm(recipe)
            return self.simulations.profile(recipe)
        except InputError as error:
            if value <= getattr(self.recipe, self.found.field):
                raise  # the recipe itself cannot be simulated
            self.found.limit = str(error)
            return None

    def _is_the_limit(self) -> bool:
        """Whether low is the limit, since by the formula that holds there one unit more does not fit."""
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
        """The units to try next, between low and high, after `tried` units were."""
        low, high, found = self.low, self.high, self.found
        impossible = found.next_value is not None and found.next_profile is None
        if impossible or len(found.tried) > MOST_GUESSES:
            return low + max(1, (high - low) // 2)
        limit = self._expected_limit()
        if limit is None:
            limit = self._by_what_grows(tried)
        else:
            self._likely = limit
        # where low is the limit already, as far as is known, one unit more shows it
        return min(max(limit, low + 1), high - 1)

    def _by_what_grows(self, tried: int) -> int:
        """The limit in units if all memory but what stays from step to step is proportional to the field."""
        recipe, simulations = self._with(tried), self.simulations
        kept = simulations.kept_bytes(recipe)
        grows = (simulations.least_bytes(recipe) or kept) - kept
        return tried * (simulations.hardware.memory_bytes - kept) // max(1, grows)

    def _expected_limit(self) -> int | None:
        """The most units between low and high that fit by the formula; None where there is no formula."""
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
            if not stride:  # the memory that was fragmented here is needed on top of what is allocated
                guess, stride = self._most_within(self._fragmented.get(guess, 0)) or guess, 1
            else:
                guess, stride = guess + (stride if fits else -stride), stride * 2
        return low

    def _most_within(self, fragmented_bytes: int) -> int | None:
        """The most units, from low to below high, that fit if exactly so many bytes of the memory are lost to
        fragmentation. None without a formula. Found by secants, since needs are nearly a straight line."""
        limit = self.simulations.hardware.memory_bytes - fragmented_bytes
        low, high = self.low, self.high
        units = max(self.low, 1) if self.found.tried else self.start
        last: tuple[int, int] | None = None  # units, and the bytes that they need
        while high - low > 1:
            units = min(max(units, low + 1), high - 1)
            needed = self.simulations.least_bytes(self._with(units))
            if needed is None:
                return None
            if needed <= limit:
                low = units
            else:
                high = units
            if last is None or needed == last[1] or units == last[0]:
                step = max(1, units // 8) if needed <= limit else -max(1, units // 8)
            else:
                slope = (needed - last[1]) / (units - last[0])
                step = int((limit - needed) // slope) if slope > 0 else high - units
            last, units = (units, needed), units + step
        return low

    def _fits(self, units: int) -> bool | None:
        """Whether so many units fit by the formula; None without one."""
        if units not in self._expected:
            profile = self.simulations.expected(self._with(units))
            if profile is None:
                return None
            self._expected[units] = profile.oom is None
            if profile.oom is not None:
                self._fragmented[units] = profile.oom.reserved_unallocated_bytes or 0
        return self._expected[units]
