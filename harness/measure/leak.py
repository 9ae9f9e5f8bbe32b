"""Finds memory that grows from step to step, by what is allocated when steps end. Imports no torch."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from harness.snapshot import BEFORE_RECORDING, AllocationSpan, breakdown_at, top_allocations
from harness.step_profile import CATEGORIES, LeakReport

LEAST_BYTES = 4096
"""A step of a watched loop may leave less than this behind: a detached loss that waits for the next line of a
log takes 512 bytes of a GPU."""
FEWEST_ENDS = 3
"""How many steps must end, each with more allocated than the one before: two may differ by chance."""


def find_leak(
    end_bytes: Sequence[int], spans: Sequence[AllocationSpan], recorded_ends: Sequence[int]
) -> LeakReport | None:
    """A recipe's leak, or None.

    - `end_bytes`: the bytes allocated at the end of each timed step; if there are FEWEST_ENDS of them, they
      decide whether there is a leak.
    - `spans`, `recorded_ends`: the history of the recorded steps, and the index of each step's last event.
      They show what grew. Where no timed step was looked at (on a CPU) they also decide: something that the
      step before the last allocated must still be live after the last, and the last must have added to it.
    """
    grown: dict[str, int] = {}
    left = None
    survived = False
    if len(recorded_ends) >= 2:
        before, after = recorded_ends[-2:]
        grown = _growth(spans, before, after)
        survived = any(BEFORE_RECORDING < s.born <= before and s.live_at(after) for s in spans)
        new = top_allocations([span for span in spans if before < span.born <= after], after)
        left = next((made for made in new if grown.get(made.category, 0) > 0), None)
    if len(end_bytes) >= FEWEST_ENDS:
        if not all(later > earlier for earlier, later in pairwise(end_bytes)):
            return None
        each = (end_bytes[-1] - end_bytes[0]) // (len(end_bytes) - 1)
        return LeakReport(bytes_per_step=each, num_steps=len(end_bytes), by_category=grown, largest=left)
    each = sum(grown.values())
    if not survived or each <= 0:
        return None
    return LeakReport(bytes_per_step=each, num_steps=2, by_category=grown, largest=left)


def find_kept(spans: Sequence[AllocationSpan], recorded_ends: Sequence[int]) -> LeakReport | None:
    """A leak of a loop whose batches may differ in length: what every recorded step but the last allocated
    and is still live when the last has ended. None where a step left next to nothing, or too few steps ended.
    """
    if len(recorded_ends) < FEWEST_ENDS:
        return None
    last = recorded_ends[-1]
    left: list[list[AllocationSpan]] = [[] for _ in range(len(recorded_ends) + 1)]
    for span in spans:
        if BEFORE_RECORDING < span.born <= last and span.live_at(last):
            # between two steps the next one's batch may be made
            left[bisect_left(recorded_ends, span.born) + (span.birth_phase == "between")].append(span)
    del left[-2:]  # the last step's batch and loss have names until the next one's
    sizes = [sum(span.size_bytes for span in of_step) for of_step in left]
    if min(sizes) < LEAST_BYTES:
        return None
    made = Counter[str]()
    for allocation in (found := top_allocations(left[-1], last, len(left[-1]))):
        made[allocation.category] += allocation.size_bytes
    each = sum(sizes) // len(sizes)
    return LeakReport(bytes_per_step=each, num_steps=len(sizes), by_category=made, largest=found[0])


def _growth(spans: Sequence[AllocationSpan], before: int, after: int) -> dict[str, int]:
    """By category, how many more bytes are live at `after` than at `before`; without those that are equal."""
    first, last = (breakdown_at(spans, when).by_category() for when in (before, after))
    changes = {name: (last[name] or 0) - (first[name] or 0) for name in CATEGORIES}
    return {name: change for name, change in changes.items() if change}
