"""Finds what grows from step to step in a recording, by the stack that allocated it. Imports no torch."""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.snapshot.held import Holder, holders_of
from harness.snapshot.recording import Recording
from harness.snapshot.shape import is_dict, is_list
from harness.snapshot.spans import AllocationSpan
from harness.snapshot.trace import step_ends

MOST_ENDS = 200
"""How many ends of steps are looked at, spread evenly: a file may hold a million steps and as many stacks."""
FEWEST_ENDS = 3
"""How many steps must have ended: two may differ by the first step's optimizer state, or by chance."""
_OF_A_STEP = re.compile(r"(?:## )?(Optimizer\.step#|ProfilerStep#)")
"""Names that torch gives to ranges, which newer snapshots list as external_annotations."""


@dataclass(frozen=True)
class Growth:
    """How much more memory one stack's allocations hold from one end of a step to the next."""

    holder: Holder
    at_ends_bytes: list[int]
    """The bytes it held at the end of each step that is looked at (at most MOST_ENDS)."""
    count: int
    """How many of its allocations were live at the end of the last step."""

    @property
    def total_bytes(self) -> int:
        """How many bytes more it held at the last end than at the first."""
        return self.at_ends_bytes[-1] - self.at_ends_bytes[0]


@dataclass(frozen=True)
class Leaks:
    """What grew, and how the steps were found."""

    steps_from: str
    """How the steps were found, in words; where there are too few, why."""
    ends: list[int]
    """The index in the trace of each step's last entry."""
    allocated_bytes: list[int]
    """All bytes allocated at the end of each step that is looked at (at most MOST_ENDS)."""
    growths: list[Growth]
    """The stacks that grew, those with the most bytes first."""

    @property
    def can_tell(self) -> bool:
        """Whether enough steps ended to tell a leak from chance."""
        return len(self.ends) >= FEWEST_ENDS

    @property
    def grown_bytes(self) -> int:
        return sum(growth.total_bytes for growth in self.growths)

    def as_json(self) -> dict[str, Any]:
        """The leaks as plain data for JSON."""
        return {
            "steps_from": self.steps_from,
            "steps": len(self.ends),
            "allocated_bytes": self.allocated_bytes,
            "grown_bytes": self.grown_bytes,
            "growths": [
                {
                    **growth.holder._asdict(),
                    "total_bytes": growth.total_bytes,
                    "at_ends_bytes": growth.at_ends_bytes,
                    "count": growth.count,
                }
                for growth in self.growths
            ],
        }


def find_leaks(recording: Recording, annotations: Any = None) -> Leaks:
    """The stacks that hold more and more as steps end. `annotations`: the snapshot's external_annotations.

    A stack has grown if it never shrinks from one end to the next and grows at two ends or more: such as what
    a list keeps of every step, whatever its size, but not optimizer state, which the first step makes.
    """
    ends, found = _steps(
        recording, [one for one in annotations if is_dict(one)] if is_list(annotations) else []
    )
    if len(ends) < FEWEST_ENDS:
        return Leaks(found, ends, [], [])
    by_stack: dict[tuple[str, ...], list[tuple[AllocationSpan, Holder]]] = {}
    for span, holder in zip(recording.spans, holders_of(recording), strict=True):
        by_stack.setdefault(holder.stack, []).append((span, holder))
    last, most = len(ends) - 1, MOST_ENDS - 1
    looked_at = ends if last <= most else [ends[n * last // most] for n in range(MOST_ENDS)]
    allocated = _at_ends(recording.spans, looked_at)
    growths: list[Growth] = []
    for held in by_stack.values():
        if sum(span.live_at(ends[-1]) - span.live_at(ends[0]) for span, _ in held) <= 0:
            continue
        sizes = _at_ends([span for span, _ in held], looked_at)
        steps = [later - earlier for earlier, later in pairwise(sizes)]
        if min(steps) >= 0 and sum(step > 0 for step in steps) >= 2:
            at_end = [holder for span, holder in held if span.live_at(ends[-1])]
            growths.append(Growth(Counter(at_end).most_common(1)[0][0], sizes, len(at_end)))
    growths.sort(key=lambda growth: (-growth.total_bytes, growth.holder))
    return Leaks(found, ends, allocated, growths)


def _at_ends(spans: Sequence[AllocationSpan], ends: Sequence[int]) -> list[int]:
    """The bytes of `spans` that are live right after each of the `ends`."""
    changes = [0] * (len(ends) + 1)
    for span in spans:
        changes[bisect_left(ends, span.born)] += span.size_bytes
        if span.died is not None:
            changes[bisect_left(ends, span.died)] -= span.size_bytes
    total = 0
    return [total := total + change for change in changes[:-1]]


def _steps(recording: Recording, annotations: Sequence[Mapping[str, Any]]) -> tuple[list[int], str]:
    """The last entry of each step, and what the steps were found by, in words."""
    trace = recording.trace
    if len(ends := step_ends(trace)) > 1:
        return ends, "the metadata of its entries"
    if len(ends := _annotated(recording, annotations)) > 1:
        return ends, "torch's annotations of the steps"
    ends = _after_optimizer(recording.phases)
    if len(ends) > 1:
        where = "the stacks" if recording.from_stacks else "the stated phases"
        return ends, f"the optimizer's steps in {where}"
    if ends:
        return ends, "the optimizer's steps in the stacks"
    return ends, (
        "neither metadata nor annotations nor an optimizer in the stacks name any. "
        'Record at least three steps with torch.cuda.memory._record_memory_history(stacks="python")'
    )


def _annotated(recording: Recording, annotations: Sequence[Mapping[str, Any]]) -> list[int]:
    """The last entry of each range that torch names after steps. Of several optimizers, as a GAN has, the one
    that steps least often counts.
    """
    times = [entry.get("time_us", 0) for entry in recording.trace]
    if not times or times[-1] <= 0:
        return []
    moments: dict[str, list[int]] = {}
    for one in annotations:
        name, time = one.get("name"), one.get("time_us")
        if not isinstance(name, str) or not isinstance(time, int) or one.get("stage") != "END":
            continue
        match = _OF_A_STEP.match(name)
        if match and one.get("device", recording.device) in (recording.device, -1):
            key = "ProfilerStep" if match[1] == "ProfilerStep#" else name
            moments.setdefault(key, []).append(time)
    repeated = Counter({name: len(found) for name, found in moments.items() if len(found) > 1})
    if not repeated:
        return []
    name = "ProfilerStep" if "ProfilerStep" in repeated else repeated.most_common()[-1][0]
    ends = {bisect_right(times, time) - 1 for time in moments[name]}
    return sorted(end for end in ends if end >= 0)


def _after_optimizer(phases: Sequence[str | None]) -> list[int]:
    """The last entry before the data, forward or backward phase that follows each optimizer step; after the
    last optimizer step, the trace's last entry.
    """
    ends: list[int] = []
    stepped = False
    for i, phase in enumerate(phases):
        if phase in ("forward", "backward", "data") and stepped:
            ends.append(i - 1)
            stepped = False
        stepped = stepped or phase == "optimizer_step"
    return [*ends, len(phases) - 1] if stepped else ends
