"""The groups by which a timeline is stacked: categories, or places in the code. Imports no torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness.snapshot import NO_STACK, AllocationSpan, Recording, find_peak, own_place, place
from harness.step_profile import CATEGORIES

BEFORE = "before the recording"
"""The group of memory that was allocated before the recording and of which nothing is known."""
OTHER_CODE = "other code"
PLACES = 6
"""How many places in the code have a group of their own in a recording without phases."""


def groups_of(recording: Recording) -> tuple[tuple[str, ...], NDArray[np.uint8], bool]:
    """The names of the groups, the index of every span's group, and whether the groups are categories."""
    if recording.categories is None:
        return _by_place(recording.spans)
    groups = (*CATEGORIES, BEFORE)
    code = {name: i for i, name in enumerate(groups)}
    recorded = any(span.born >= 0 or span.died is not None for span in recording.spans)
    unknown = BEFORE if recorded else "other"
    return groups, np.array([code[name or unknown] for name in recording.categories], np.uint8), True


def _by_place(spans: Sequence[AllocationSpan]) -> tuple[tuple[str, ...], NDArray[np.uint8], bool]:
    """`groups_of` for a recording without categories: the places that hold most at the peak, and the rest."""
    moment = find_peak(spans).index
    names = _places(spans)
    at_peak: dict[str, int] = {}
    for name, span in zip(names, spans, strict=True):
        if name != BEFORE:
            at_peak[name] = at_peak.get(name, 0) + span.size_bytes * span.live_at(moment)
    largest = sorted(at_peak, key=lambda name: (-at_peak[name], name))[:PLACES]
    groups = (*largest, OTHER_CODE, BEFORE)
    code = {name: i for i, name in enumerate(groups)}
    return groups, np.array([code.get(name, code[OTHER_CODE]) for name in names], np.uint8), False


def _places(spans: Sequence[AllocationSpan]) -> list[str]:
    """The line of code that stands for each span: the innermost of the user's program if several lines of it
    allocate, or else the innermost of all. A program that only calls a Trainer has one line of its own, by
    which its allocations would not differ. BEFORE for a span from before the recording without a stack.
    """
    stacks = {id(span.frames): span.frames for span in spans if span.frames}
    own = {stack: own_place(frames) for stack, frames in stacks.items()}
    several = len({name for name in own.values() if name}) > 1
    named = {stack: (several and own[stack]) or place(frames) for stack, frames in stacks.items()}
    return [named.get(id(span.frames), BEFORE if span.born < 0 else NO_STACK) for span in spans]
