"""What the search tries, value by value, where what a simulation would say is known by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import InputError
from harness.fit.exact import ExactFit, fit_exact, fits_beyond
from harness.fit.search import LARGEST_MICRO_BATCH, largest
from harness.hardware.hardware import find_hardware, with_memory
from harness.recipe.recipe import Recipe
from tests.support.tiny import tiny

MiB = 2**20
A100 = find_hardware("a100-40gb")
CONTEXT = A100.calibration.cuda_context_bytes
KEPT = 10
"""MiB that stay from step to step."""


class ByHand:
    """Stands in for simulations: `allocated` MiB by micro batch, and so many lost in pieces. After
    `formula_after` of them there is a formula."""

    def __init__(
        self, mib: int, allocated: Callable[[int], int], in_pieces: int = 0, formula_after: int = 1000
    ) -> None:
        self.hardware = with_memory(A100, CONTEXT + mib * MiB)
        self._mib, self._allocated, self._in_pieces = mib, allocated, in_pieces
        self._formula_after = formula_after
        self.simulated: list[int] = []

    def value(self, recipe: Recipe) -> int:
        return recipe.micro_batch_size

    def profile(self, recipe: Recipe) -> Any:
        """Out of memory where not all that is reserved fits."""
        if self.value(recipe) not in self.simulated:
            self.simulated.append(self.value(recipe))
        return self._profile(recipe)

    def _profile(self, recipe: Recipe) -> Any:
        if self._allocated(self.value(recipe)) + self._in_pieces > self._mib:
            return SimpleNamespace(oom=SimpleNamespace(reserved_unallocated_bytes=self._in_pieces * MiB))
        return self.with_plenty(recipe)

    def with_plenty(self, recipe: Recipe) -> Any:
        """As if memory were endless."""
        allocated = self._allocated(self.value(recipe)) * MiB
        memory = SimpleNamespace(peak_allocated_bytes=allocated, cuda_context_bytes=CONTEXT)
        return SimpleNamespace(oom=None, memory=memory)

    def confirm(self, recipe: Recipe) -> None:
        pass

    def time(self, recipe: Recipe) -> None:
        """The largest that fits is timed too, and was seen to fit."""
        assert self.value(recipe) in self.simulated
        assert self._profile(recipe).oom is None

    def kept_bytes(self, recipe: Recipe) -> int:
        return KEPT * MiB + CONTEXT

    def explains(self, recipe: Recipe) -> bool:
        return len(self.simulated) >= self._formula_after

    def expected(self, recipe: Recipe) -> Any:
        return self._profile(recipe) if self.explains(recipe) else None

    def least_bytes(self, recipe: Recipe) -> int | None:
        known = self.value(recipe) in self.simulated or self.explains(recipe)
        return self._allocated(self.value(recipe)) * MiB + CONTEXT if known else None

    def simulated_before(self, recipe: Recipe, field: str) -> list[int]:
        return []

    def keep(self) -> None:
        pass


def found_by(simulations: ByHand, start: int = 1, **how: Any) -> ExactFit:
    return fit_exact(tiny(micro_batch_size=start), simulations, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("formula_after", [1, 2, 3, 1000])
@pytest.mark.parametrize("start", [1, 4, 30, 64])
@pytest.mark.parametrize("in_pieces", [0, 6])
def test_the_end_is_found_from_anywhere(start: int, in_pieces: int, formula_after: int) -> None:
    """10 + 3n meets 100 at 30, and 94 at 28."""
    simulations = ByHand(100, lambda rows: KEPT + 3 * rows, in_pieces, formula_after)
    found = found_by(simulations, start)
    assert (found.value, found.next_value, found.limit) == (28 if in_pieces else 30, found.value + 1, None)
    assert simulations.simulated[0] == start
    assert len(simulations.simulated) <= (4 if formula_after <= 3 else 6)


def test_what_grows_leads_to_the_end_and_the_formula_spares_the_next_one() -> None:
    simulations = ByHand(100, lambda rows: KEPT + 3 * rows, formula_after=2)
    found = found_by(simulations)
    assert simulations.simulated == [1, 30]
    assert found.tried == {1: True, 30: True, 31: False}


@pytest.mark.parametrize("formula_after", [2, 1000])
@pytest.mark.parametrize(("start", "last"), [(1, 11), (3, 9), (3, 6), (5, 2), (4, 0), (1, 200)])
def test_where_memory_is_no_line_the_interval_is_divided(start: int, last: int, formula_after: int) -> None:
    steps = ByHand(100, lambda rows: 50 if rows <= last else 200, formula_after=formula_after)
    found = found_by(steps, start)
    assert (found.value or 0, found.next_value) == (last, last + 1)
    assert len(steps.simulated) <= 24


def test_a_curve_is_followed() -> None:
    found = found_by(ByHand(1000, lambda rows: 10 + rows * rows, formula_after=3))
    assert (found.value, found.next_value) == (31, 32)


def test_nothing_beyond_the_largest_is_looked_for() -> None:
    found = found_by(ByHand(100, lambda rows: 11))
    assert max(found.tried) == found.value == LARGEST_MICRO_BATCH == 65_536
    assert all(type(value) is int for value in found.tried)
    assert found.next_value is None
    assert "65536" in str(found.limit)


def test_the_largest_of_all_is_a_whole_number_of_steps() -> None:
    found = found_by(ByHand(100, lambda rows: 11), start=1000, multiple_of=1000)
    assert max(found.tried) == found.value == 65_000


def test_sequences_are_tried_in_steps() -> None:
    class OfTokens(ByHand):
        def value(self, recipe: Recipe) -> int:
            return recipe.seq_len

    simulations: Any = OfTokens(1000, lambda tokens: KEPT + tokens, formula_after=2)
    found = fit_exact(tiny(seq_len=64), simulations, "seq_len", multiple_of=64)
    # 10 + n meets 1000 at 990: 15 steps of 64
    assert (found.value, found.next_value) == (960, 1024)
    assert simulations.simulated == [64, 960]


def test_the_recipes_own_value_must_be_possible_and_a_larger_one_need_not() -> None:
    class Short(ByHand):
        def profile(self, recipe: Recipe) -> Any:
            if recipe.micro_batch_size > 5:
                raise InputError("no more than 5")
            return super().profile(recipe)

    for formula_after in (1, 2, 1000):
        found = found_by(Short(100, lambda rows: KEPT + rows, formula_after=formula_after))
        assert (found.value, found.next_value) == (5, 6)
        assert (found.limit, found.next_profile) == ("no more than 5", None)
        with pytest.raises(InputError, match="no more than 5"):
            found_by(Short(100, lambda rows: 1, formula_after=formula_after), start=6)


def test_beyond_what_is_known_the_formula_says_where_to_look() -> None:
    known = ExactFit("micro_batch_size", 1, 10)
    for last, expected in ((30, 30), (10, None)):
        simulations: Any = ByHand(100, lambda rows, last=last: 50 if rows <= last else 200, formula_after=0)
        found = fits_beyond(tiny(), simulations, known)
        assert (found.value, list(found.tried)) == (expected, [expected] if expected else [])
    nobody_knows: Any = ByHand(100, lambda rows: 50)
    assert fits_beyond(tiny(), nobody_knows, known).value is None


@pytest.mark.parametrize("highest", [1, 2, 7, 8, 100])
def test_the_largest_that_fits_is_found_whatever_it_is(highest):
    for last in range(highest + 3):
        asked: list[int] = []

        def fits(n: int, last: int = last, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n <= last

        assert largest(fits, highest) == min(last, highest)
        assert max(asked) <= highest
        assert len(asked) == len(set(asked))
