"""Aligning sequences: against the textbook longest common subsequence, and fast where layers repeat."""

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trace_diff.alignment import align

sequences = st.lists(st.integers(0, 3), max_size=14)


def longest_common_subsequence(one: list[int], other: list[int]) -> int:
    """Its length, by the textbook's table."""
    above = [0] * (len(other) + 1)
    for x in one:
        row = [0]
        for j, y in enumerate(other):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
        above = row
    return above[-1]


@given(sequences, sequences)
def test_matches_are_equal_in_order_and_as_many_as_can_be(one: list[int], other: list[int]) -> None:
    alignment = align(one, other)
    i = j = 0
    for start, other_start, length in alignment.matches:
        assert length > 0
        assert (start, other_start) != (i, j) or (i, j) == (0, 0)  # runs that touch are one run
        assert start >= i
        assert other_start >= j
        assert one[start : start + length] == other[other_start : other_start + length]
        i, j = start + length, other_start + length
    assert alignment.complete
    assert sum(match.length for match in alignment.matches) == longest_common_subsequence(one, other)


def test_too_many_differences_leave_the_common_beginning_and_end() -> None:
    one, other = [1, 2, *range(100, 150), 3], [1, 2, *range(200, 250), 3]
    alignment = align(one, other, max_differences=20)
    assert not alignment.complete
    assert alignment.matches == [(0, 0, 2), (52, 52, 1)]
    assert align(one, other, max_differences=100).complete


def test_a_hundred_thousand_events_of_repeating_layers_take_seconds() -> None:
    rng = random.Random(0)
    layer = [rng.randrange(30) for _ in range(600)]
    one = layer * 160
    other = list(one)
    for _ in range(500):
        other.pop(rng.randrange(len(other)))
    start = time.process_time()
    alignment = align(one, other)
    assert time.process_time() - start < 5
    assert sum(match.length for match in alignment.matches) == len(other)
