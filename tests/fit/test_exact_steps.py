"""What the search tries, value by value, where what a simulation would say is known by hand."""

from __future__ import annotations

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


class ByHand:
    """Stands in for simulations: `allocated` MiB by micro batch, and so many lost in pieces."""

    def __init__(self, mib: int, allocated: Callable[[int], int], in_pieces: int = 0) -> None:
        self.hardware = with_memory(A100, CONTEXT + mib * MiB)
        self._mib, self._allocated, self._in_pieces = mib, allocated, in_pieces
        self.plenty: list[int] = []

    def profile(self, recipe: Recipe) -> Any:
        """Out of memory where not all that is reserved fits."""
        allocated = self._allocated(recipe.micro_batch_size)
        if allocated + self._in_pieces > self._mib:
            return SimpleNamespace(oom=SimpleNamespace(reserved_unallocated_bytes=self._in_pieces * MiB))
        return self._with(allocated)

    def with_plenty(self, recipe: Recipe) -> Any:
        """As if memory were endless."""
        self.plenty.append(recipe.micro_batch_size)
        return self._with(self._allocated(recipe.micro_batch_size))

    def _with(self, allocated: int) -> Any:
        reserved = (allocated + self._in_pieces) * MiB
        memory = SimpleNamespace(peak_allocated_bytes=allocated * MiB, peak_reserved_bytes=reserved)
        return SimpleNamespace(oom=None, memory=memory)


def tried(simulations: ByHand, start: int = 1, **how: Any) -> tuple[list[int], ExactFit]:
    found = fit_exact(tiny(micro_batch_size=start), simulations, **how)  # type: ignore[arg-type]
    return list(found.tried), found


@pytest.mark.parametrize(
    ("start", "last", "values"),
    [
        # doubled while it fits; then two thirds of what is between
        (1, 11, [1, 2, 4, 8, 16, 13, 11, 12]),
        (3, 9, [3, 6, 12, 10, 8, 9]),
        (3, 6, [3, 6, 12, 10, 8, 7]),
        (3, 8, [3, 6, 12, 10, 8, 9]),
        # what the recipe says is too much: one row, and up from there
        (5, 2, [5, 1, 3, 2]),
        (4, 0, [4, 1]),
    ],
)
def test_where_memory_is_no_line_the_interval_is_divided(start, last, values):
    steps = ByHand(100, lambda rows: 50 if rows <= last else 200)
    if start > last > 0:  # a line through 50 and 200 leads nowhere here
        steps.with_plenty = lambda recipe: steps._with(50)  # type: ignore[method-assign]
    order, found = tried(steps, start)
    assert order == values
    assert (found.value or 0, found.next_value) == (last, last + 1)


def test_a_line_through_two_that_fit_leads_to_the_end():
    order, found = tried(ByHand(100, lambda rows: 10 + 3 * rows))
    # 1 and 2 are on the line 10 + 3n, which meets 100 at 30
    assert order == [1, 2, 30, 31]
    assert (found.value, found.next_value, found.limit) == (30, 31, None)


def test_a_line_through_the_recipes_own_value_that_does_not_fit():
    simulations = ByHand(100, lambda rows: 10 + 3 * rows)
    order, found = tried(simulations, 64)
    assert order == [64, 1, 30, 31]
    assert set(simulations.plenty) == {64}
    assert found.value == 30


def test_what_is_lost_in_pieces_is_learnt_from_what_was_tried():
    """The line is of what is allocated; the 6 MiB beside it are seen where it fits, and where it does not."""
    order, found = tried(ByHand(100, lambda rows: 10 + 3 * rows, in_pieces=6))
    assert order == [1, 2, 28, 29]
    assert found.value == 28


def test_a_curve_is_followed_by_the_last_two_that_fit():
    order, found = tried(ByHand(1000, lambda rows: 10 + rows * rows))
    assert found.value == 31
    # the line through 1 and 2 has slope 3 and meets 1000 at 330; what fails moves no line, so two thirds of
    # what is left are tried; 30 is the sixth guess at the most, and from there it is two thirds again
    assert order == [1, 2, 330, 220, 147, 98, 66, 44, 30, 39, 36, 34, 32, 31]


def test_arithmetic_says_where_to_begin_and_where_to_go_on(monkeypatch):
    """It expects 3 MiB for each row, and leaves 5 % of the memory to what is lost in pieces."""
    monkeypatch.setattr("harness.fit.exact.needs_of", lambda *_: lambda rows: CONTEXT + (10 + 3 * rows) * MiB)
    begin = (int((CONTEXT + 1000 * MiB) * 0.95) - CONTEXT - 10 * MiB) // (3 * MiB)
    assert begin == 305

    def guided(needs: Callable[[int], int]) -> list[int]:
        return tried(ByHand(1000, needs), guided=True)[0]

    # it was right, and nothing is lost: (1000 - 10) / 3
    assert guided(lambda rows: 10 + 3 * rows) == [begin, 330, 331]
    # a row needs 3.6: down by a 50th of 305, doubled, until one fits, 263; that took 158 more than expected,
    # which leads to 277; two thirds of what is left are 272, whose 163 more lead to 275; the next is the end
    assert guided(lambda rows: 10 + 18 * rows // 5) == [begin, 299, 287, 263, 277, 272, 275, 276]
    # a wall: what fits beside it says nothing of where it is
    wall = [begin, 299, 287, 263, 215, 119, 183, 204, 197, 201, 199, 200]
    assert guided(lambda rows: 10 if rows <= 200 else 2000) == wall
    # from few the first stride is one
    near = ByHand(100, lambda rows: 10 if rows <= 15 else 200)
    assert tried(near, guided=True)[0] == [20, 19, 17, 13, 15, 16]


def test_a_device_that_looks_full_and_takes_more_is_not_filled_one_by_one(monkeypatch):
    """PyTorch gives back what it holds in pieces before memory runs out: all is reserved before the end."""

    class Full(ByHand):
        def _with(self, allocated: int) -> Any:
            profile = super()._with(allocated)
            profile.memory.peak_reserved_bytes = self._mib * MiB
            return profile

    monkeypatch.setattr("harness.fit.exact.needs_of", lambda *_: lambda rows: CONTEXT + (10 + 3 * rows) * MiB)
    order, found = tried(Full(1000, lambda rows: 10 + 3 * rows), start=100, guided=True)
    assert (found.value, found.next_value) == (330, 331)
    assert len(order) <= 6, order


def test_nothing_beyond_the_largest_is_looked_for():
    order, found = tried(ByHand(100, lambda rows: 1))
    assert max(order) == found.value == LARGEST_MICRO_BATCH == 65_536
    assert all(type(value) is int for value in order)
    assert found.next_value is None
    assert "65536" in str(found.limit)


def test_the_largest_of_all_is_a_whole_number_of_steps():
    order, found = tried(ByHand(100, lambda rows: 1), start=1000, multiple_of=1000)
    assert max(order) == found.value == 65_000
    assert all(type(value) is int for value in order)


def test_sequences_are_tried_in_steps():
    class OfTokens(ByHand):
        def profile(self, recipe: Recipe) -> Any:
            return super().profile(recipe.model_copy(update={"micro_batch_size": recipe.seq_len}))

    simulations: Any = OfTokens(1000, lambda tokens: 10 + tokens)
    found = fit_exact(tiny(seq_len=64), simulations, "seq_len", multiple_of=64)
    # the line through 64 and 128 meets 1000 at 990: 15 steps of 64
    assert list(found.tried) == [64, 128, 960, 1024]
    assert (found.value, found.next_value) == (960, 1024)


def test_the_recipes_own_value_must_be_possible_and_a_larger_one_need_not():
    class Short(ByHand):
        def profile(self, recipe: Recipe) -> Any:
            if recipe.micro_batch_size > 5:
                raise InputError("no more than 5")
            return super().profile(recipe)

    order, found = tried(Short(100, lambda rows: 1))
    assert (order, found.value, found.next_value) == ([1, 2, 4, 8, 6, 5], 5, 6)
    assert (found.limit, found.next_profile) == ("no more than 5", None)
    with pytest.raises(InputError, match="no more than 5"):
        tried(Short(100, lambda rows: 1), start=6)


def test_beyond_what_is_known_three_values_are_tried_at_the_most(monkeypatch):
    monkeypatch.setattr("harness.fit.exact.needs_of", lambda *_: lambda rows: CONTEXT + (10 + 3 * rows) * MiB)

    def beyond(last: int) -> tuple[list[int], int | None]:
        simulations: Any = ByHand(100, lambda rows: 50 if rows <= last else 200)
        found = fits_beyond(tiny(), simulations, ExactFit("micro_batch_size", 1, 10))
        assert (found.profile is None) == (found.value is None)
        return list(found.tried), found.value

    # arithmetic expects 30; half way there from 10 is 20; the next is 11
    assert beyond(30) == ([30], 30)
    assert beyond(25) == ([30, 20], 20)
    assert beyond(15) == ([30, 20, 11], 11)
    assert beyond(10) == ([30, 20, 11], None)


def test_beyond_without_arithmetic_the_next_value_is_tried(monkeypatch):
    def unknown(*_: Any) -> None:
        raise InputError("arithmetic does not know it")

    monkeypatch.setattr("harness.fit.exact.needs_of", unknown)
    simulations: Any = ByHand(100, lambda rows: 50)
    found = fits_beyond(tiny(), simulations, ExactFit("micro_batch_size", 1, 10))
    assert (list(found.tried), found.value) == ([11], 11)


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
