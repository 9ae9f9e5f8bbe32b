"""The largest micro batch or sequence that fits, found by simulating and not by arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.search import (
    DEFAULT_MARGIN,
    LARGEST,
    MULTIPLES,
    FitField,
    largest,
    largest_within,
    needs_of,
    usable_bytes,
)
from harness.fit.simulations import Simulations
from harness.recipe import Recipe, check_recipe
from harness.step_profile import StepProfile

MAX_GUESSES = 6
"""Guesses from what a simulation took; then the interval is halved."""
FIRST_STRIDE = 50
"""Where nothing can be guessed yet, the first stride is this part of the value; each next one is double."""


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
    """Out of memory at the next value; None when that was not simulated, for `limit`."""
    limit: str | None = None
    """Why there is nothing beyond the largest value, where memory is not the reason."""
    tried: dict[int, bool] = dataclasses.field(default_factory=dict[int, bool])
    """Every simulated value, in order, and whether it fits."""

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
            "next": self.next_value,
            "next_out_of_memory_in": oom and oom.phase,
            "next_impossible": self.limit,
            "tried": {str(value): fits for value, fits in self.tried.items()},
        }


def fit_exact(
    recipe: Recipe,
    simulations: Simulations,
    field: FitField = "micro_batch_size",
    *,
    multiple_of: int | None = None,
    guided: bool = False,
    told: Callable[[int, bool], None] = lambda value, fits: None,
) -> ExactFit:
    """Search for the largest value of `field`, a multiple of `multiple_of`, that fits.

    It was simulated to fit, and the next one not to. `guided`: begin where arithmetic, if it knows the model,
    expects the answer, and not at the recipe's own value. `told` hears each simulation's outcome. Raises
    InputError for a recipe that cannot be simulated.
    """
    unit = multiple_of or MULTIPLES[field]
    return _Search(recipe, simulations, field, unit, guided, told).largest()


def fits_beyond(
    recipe: Recipe,
    simulations: Simulations,
    known: ExactFit,
    told: Callable[[int, bool], None] = lambda value, fits: None,
) -> ExactFit:
    """A larger value than the one `known`, which other allocator settings gave, that fits with these.

    Three simulations at the most: where arithmetic expects the end if nothing is lost in pieces, half way
    there, and the next value. The value is None if none of them fits.
    """
    return _Search(recipe, simulations, known.field, known.multiple_of, True, told).beyond(known)


class _Search:
    """Between the largest value that was seen to fit and the smallest that was seen not to.

    A simulation that runs out of memory ends early, so trying too much costs less than trying too little.
    """

    def __init__(
        self,
        recipe: Recipe,
        simulations: Simulations,
        field: FitField,
        unit: int,
        guided: bool,
        told: Callable[[int, bool], None],
    ) -> None:
        self.recipe, self.simulations, self.told = recipe, simulations, told
        self.hardware = simulations.hardware
        self.found = ExactFit(field, unit)
        self.fitting: dict[int, StepProfile] = {}
        """By value."""
        self.low, self.high = 0, LARGEST[field] // unit + 1
        """In units: what is known to fit, and what is known not to, or is not looked for."""
        self.stride = 0
        self.arithmetic: Callable[[int], int] | None = None
        """Bytes needed, by value."""
        self.start = max(1, getattr(recipe, field) // unit)
        if guided:
            self._guide()

    def _guide(self) -> None:
        field = self.found.field
        try:
            shape = load_shape(self.recipe.model)
            needs = needs_of(self.recipe, self.hardware, field, shape)
            expected = largest_within(usable_bytes(self.hardware, DEFAULT_MARGIN), needs, field, shape)
        except InputError:  # a model, or a toggle of it, that arithmetic does not know
            return
        self.arithmetic, self.start = needs, max(1, expected // self.found.multiple_of)

    def largest(self) -> ExactFit:
        """The largest value that fits, and the next one that does not."""
        found, units = self.found, self.start
        while self.high - self.low > 1:
            profile = self._try(units)
            units = self._next(units * found.multiple_of, profile)
        if self.low:
            found.value = self.low * found.multiple_of
            found.profile = self.fitting[found.value]
        if found.next_value is None:
            found.limit = f"larger values than {LARGEST[found.field]} are not looked for"
        return found

    def beyond(self, known: ExactFit) -> ExactFit:
        """See fits_beyond."""
        value, unit, end = known.value or 0, known.multiple_of, 0
        self.low = value // unit
        if self.arithmetic is not None:
            waste = self._wastes(known.profile, self.arithmetic, value)[1] if known.profile is not None else 0
            end = self._most_within(self.arithmetic, waste)
        for units in sorted({end, (self.low + end) // 2, self.low + 1}, reverse=True):
            if self.low < units < self.high:
                profile = self._try(units)
                if profile is not None and profile.oom is None:
                    self.found.value, self.found.profile = units * unit, profile
                    break
        return self.found

    def _try(self, units: int) -> StepProfile | None:
        """Simulate so many units, and note what it shows. None if that value cannot be."""
        found, value = self.found, units * self.found.multiple_of
        profile = self._simulated(value)
        fits = profile is not None and profile.oom is None
        found.tried[value] = fits
        self.told(value, fits)
        if profile is not None and profile.oom is None:
            self.low, self.fitting[value] = units, profile
        else:
            self.high, found.next_value, found.next_profile = units, value, profile
            found.limit = found.limit if profile is None else None
        return profile

    def _simulated(self, value: int) -> StepProfile | None:
        """The profile with that value; None if it cannot be (the reason goes to found.limit)."""
        try:
            return self.simulations.profile(self._with(value))
        except InputError as error:
            if value <= getattr(self.recipe, self.found.field):
                raise  # the recipe itself cannot be simulated
            self.found.limit = str(error)
            return None

    def _with(self, value: int) -> Recipe:
        return check_recipe({**self.recipe.model_dump(), self.found.field: value}, "fit")

    def _next(self, tried: int, profile: StepProfile | None) -> int:
        """What to try next, after `tried` gave `profile`: in units, between low and high."""
        low, high, end_is_known = self.low, self.high, self.found.next_value is not None
        needs = self.arithmetic or self._line()
        if needs is not None and profile is not None and len(self.found.tried) <= MAX_GUESSES:
            for waste in self._wastes(profile, needs, tried):
                guess = self._most_within(needs, waste)
                room = (high - low) // 8 if low and end_is_known else 0
                # this is the end, as far as is known; if the one before it seemed so too, less is wasted
                if low and guess == low and (low - 1) * self.found.multiple_of not in self.fitting:
                    return low + 1
                if low + room < guess < high - room:
                    return guess
        if low and end_is_known:
            return low + (high - low) * 2 // 3
        if not low and not self.arithmetic:
            return 1  # whether anything fits at all: if so, a line leads from there to the end
        self.stride = 2 * self.stride or max(1, self.start // FIRST_STRIDE)
        if not low:
            return max(1, high - self.stride)
        return min(low + (self.stride if self.arithmetic else low), high - 1)

    def _most_within(self, needs: Callable[[int], int], waste: int) -> int:
        """The most units that fit if `waste` bytes are taken beyond what they need."""
        limit, unit = self.hardware.memory_bytes - waste, self.found.multiple_of
        most = LARGEST[self.found.field] // unit
        return largest(lambda units: _needs_at_most(needs, units * unit, limit), most)

    def _line(self) -> Callable[[int], int] | None:
        """Memory is nearly a straight line in both fields: that through the largest that fits, and where the
        search began if that does not, or else the next smaller one that fits."""
        known, start = dict(self.fitting), self.start * self.found.multiple_of
        if known and self.found.tried.get(start) is False:
            known[start] = self.simulations.with_plenty(self._with(start))
        if len(known) < 2:
            return None
        (a, first), (b, second) = sorted(known.items())[-2:]
        slope = (_allocated(second) - _allocated(first)) / (b - a)
        at_b = _allocated(second) + self.hardware.calibration.cuda_context_bytes
        return (lambda value: int(at_b + slope * (value - b))) if slope > 0 else None

    def _wastes(self, profile: StepProfile, needs: Callable[[int], int], tried: int) -> list[int]:
        """Bytes that the device must have beyond `needs`, as this simulation shows: with fragmentation as it
        was there, and with as little as there can be."""
        if profile.oom is not None:
            return [profile.oom.reserved_unallocated_bytes or 0]
        context, needed = self.hardware.calibration.cuda_context_bytes, needs(tried)
        return [context + of(profile) - needed for of in (_reserved, _allocated)]


def _needs_at_most(needs: Callable[[int], int], value: int, limit: int) -> bool:
    try:
        return needs(value) <= limit
    except InputError:  # a sequence with more positions than the model has
        return False


def _reserved(profile: StepProfile) -> int:
    return profile.memory.peak_reserved_bytes or 0


def _allocated(profile: StepProfile) -> int:
    return profile.memory.peak_allocated_bytes or 0
