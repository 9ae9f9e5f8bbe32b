"""Aligning two long sequences that are nearly the same.

Myers, "An O(ND) difference algorithm and its variations" (Algorithmica 1, 1986): the fewest insertions and
deletions, in time that grows with the number of differences, however often the same values repeat. (difflib
looks every repetition up: the layers of a model repeat thousands of times.)
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

MAX_DIFFERENCES = 4000
"""Up to here the search takes seconds, and 32 MB for the way back."""


class Match(NamedTuple):
    """one[start : start + length] == other[other_start : other_start + length]."""

    start: int
    other_start: int
    length: int


class Alignment(NamedTuple):
    matches: list[Match]
    """In order, none empty, none touching the next in both sequences."""
    complete: bool
    """False: there are more differences than were looked for; only the common beginning and end match."""


def align(
    one: Sequence[Hashable], other: Sequence[Hashable], max_differences: int = MAX_DIFFERENCES
) -> Alignment:
    """The longest common subsequence of two sequences, as runs of equal items."""
    numbers: dict[Hashable, int] = {}
    a = [numbers.setdefault(item, len(numbers)) for item in one]
    b = [numbers.setdefault(item, len(numbers)) for item in other]
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    middle = _shortest_edit(a[head : len(a) - tail], b[head : len(b) - tail], max_differences)
    runs = [
        Match(0, 0, head),
        *(Match(i + head, j + head, n) for i, j, n in middle or ()),
        Match(len(a) - tail, len(b) - tail, tail),
    ]
    return Alignment(_joined(runs), middle is not None)


def _shortest_edit(a: list[int], b: list[int], max_differences: int) -> list[Match] | None:
    """The matching runs in order; None if there are more differences than `max_differences`.

    reached[k] is how far in `a` one gets on diagonal k (the index in a minus the one in b) with d edits.
    """
    history: list[array[int]] = []
    reached = array("i", [0]) * (2 * max_differences + 3)
    for d in range(max_differences + 1):
        for k in range(-d, d + 1, 2):
            if k == -d or (k != d and reached[k - 1] < reached[k + 1]):
                i = reached[k + 1]
            else:
                i = reached[k - 1] + 1
            j = i - k
            while i < len(a) and j < len(b) and a[i] == b[j]:
                i += 1
                j += 1
            reached[k] = i
            if i >= len(a) and j >= len(b):
                return _way_back(history, k, d, len(a))
        # negative diagonals are at the end of the array, as Python counts
        history.append(reached[: d + 1] + reached[len(reached) - d :])
    return None


def _way_back(history: list[array[int]], k: int, d: int, i: int) -> list[Match]:
    """From position `i` of the first sequence on diagonal `k`, reached with `d` edits, to the beginning."""
    matches: list[Match] = []
    while d > 0:
        before = history[d - 1]
        inserted = k == -d or (k != d and before[k - 1] < before[k + 1])
        k_before = k + 1 if inserted else k - 1
        i_before = before[k_before]
        run_start = i_before if inserted else i_before + 1
        if i > run_start:
            matches.append(Match(run_start, run_start - k, i - run_start))
        i, k, d = i_before, k_before, d - 1
    if i > 0:
        matches.append(Match(0, 0, i))
    return matches[::-1]


def _joined(runs: list[Match]) -> list[Match]:
    joined: list[Match] = []
    for run in runs:
        last = joined[-1] if joined else None
        if run.length == 0:
            continue
        if last and (last.start + last.length, last.other_start + last.length) == run[:2]:
            joined[-1] = Match(last.start, last.other_start, last.length + run.length)
        else:
            joined.append(run)
    return joined
