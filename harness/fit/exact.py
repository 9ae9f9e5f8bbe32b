"""The largest micro batch or sequence that fits, found by simulating and not by arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.allocator import Settings
from harness.errors import InputError
from harness.hardware import Hardware
from harness.recipe import Recipe, check_recipe
from harness.step_profile import StepProfile

FitField = Literal["micro_batch_size", "seq_len"]
MULTIPLES: dict[str, int] = {"micro_batch_size": 1, "seq_len": 64}
"""What values are tried: a sequence length that is not a multiple of 64 is slow, and nobody asks for one."""
MAX_GUESSES = 6
"""Steps along the straight line through two simulations; then the interval is halved."""


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
    """Out of memory at the next value; None when it is not possible for `limit`."""
    limit: str | None = None
    """Why the next value is impossible, where memory is not the reason."""
    tried: dict[int, bool] = dataclasses.field(default_factory=dict)
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
    hardware: Hardware,
    field: FitField = "micro_batch_size",
    *,
    multiple_of: int | None = None,
    settings: Settings | None = None,
    told: Callable[[int, bool], None] = lambda value, fits: None,
) -> ExactFit:
    """Search for the largest value of `field`, a multiple of `multiple_of`, that fits.

    It was simulated to fit, and the next one not to. `told` hears each simulation's outcome. Raises
    InputError for a recipe that cannot be simulated.
    """
    unit = multiple_of or MULTIPLES[field]
    found = ExactFit(field, unit)
    fitting: dict[int, StepProfile] = {}
    low, high = 0, None
    units = max(1, getattr(recipe, field) // unit)
    while high is None or high - low > 1:
        value = units * unit
        profile = _simulated(recipe, hardware, field, value, settings, found)
        fits = profile is not None and profile.oom is None
        found.tried[value] = fits
        told(value, fits)
        if fits:
            assert profile is not None
            low, fitting[units] = units, profile
        else:
            high, found.next_value, found.next_profile = units, value, profile
        units = _next(low, high, fitting, hardware, len(found.tried))
    if low:
        found.value, found.profile = low * unit, fitting[low]
    return found


def _simulated(
    recipe: Recipe,
    hardware: Hardware,
    field: FitField,
    value: int,
    settings: Settings | None,
    found: ExactFit,
) -> StepProfile | None:
    """The profile with that value; None if it cannot be (the reason goes to found.limit)."""
    from harness.simulate import simulate  # here: what else is in fit/ needs no torch

    try:
        asked = check_recipe({**recipe.model_dump(), field: value}, "fit")
        return simulate(asked, hardware, settings, explain_oom=False)[0]
    except InputError as error:
        if not any(found.tried.values()):
            raise  # the recipe itself cannot be simulated
        found.limit = str(error)
        return None


def _next(low: int, high: int | None, fitting: dict[int, StepProfile], hardware: Hardware, tried: int) -> int:
    """What to try between `low`, which fits, and `high`, which does not.

    Memory is nearly a straight line in both fields: through the two largest that fit, reserved memory (which
    fragmentation makes too large) gives a first guess, and allocated memory (which has to fit) a bound.
    """
    capacity = hardware.memory_bytes - hardware.calibration.cuda_context_bytes
    if len(fitting) >= 2 and tried <= MAX_GUESSES:
        smaller, larger = sorted(fitting)[-2:]
        for of in (_reserved, _allocated):
            a, b = of(fitting[smaller]), of(fitting[larger])
            slope = (b - a) / (larger - smaller)
            guess = larger + int((capacity - b) / slope) if slope > 0 else low
            if low < guess and (high is None or guess < high):
                return guess
    return low * 2 if high is None else (low + high) // 2


def _reserved(profile: StepProfile) -> int:
    return profile.memory.peak_reserved_bytes or 0


def _allocated(profile: StepProfile) -> int:
    return profile.memory.peak_allocated_bytes or 0
