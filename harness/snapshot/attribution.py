"""What each allocation is, and what the memory at the peak is made of.

A recording is a chronological list of events of one device. An allocation lives from the event that
made it up to, and without, the event that freed it. Two producers give the same `AllocationSpan`s: a
CUDA allocator trace (`snapshot/trace.py`), and a tracker of storages (the simulator, or live CPU tensors).
This module imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan
from harness.snapshot.stacks import stack_line
from harness.step_profile import CATEGORIES, Allocation, MemoryBreakdown


class Peak(NamedTuple):
    """The first moment with the most bytes allocated."""

    index: int
    """The event that reached it; BEFORE_RECORDING when memory only fell."""
    allocated_bytes: int
    phase: str | None


class PhaseMemory(NamedTuple):
    peak_bytes: int
    """The largest value, counting what was allocated when the phase began (as a reset counter would)."""
    end_bytes: int
    """Allocated when the phase last ended."""


def find_peak(spans: Sequence[AllocationSpan], baseline_bytes: int = 0) -> Peak:
    """The peak over the recording. `baseline_bytes`: allocated all along and shown by no span."""
    allocated, phases = _timeline(spans, baseline_bytes)
    most = max(allocated)
    slot = allocated.index(most)
    return Peak(slot - 1, most, phases[slot])


def memory_by_phase(spans: Sequence[AllocationSpan], baseline_bytes: int = 0) -> dict[str, PhaseMemory]:
    """Peak and final bytes of every phase in which something was allocated or freed."""
    allocated, phases = _timeline(spans, baseline_bytes)
    memory: dict[str, PhaseMemory] = {}
    start = 0
    for phase, slots in groupby(phases):
        end = start + sum(1 for _ in slots)
        if phase is not None:
            peak = max(allocated[max(start - 1, 0) : end])
            before = memory.get(phase)
            memory[phase] = PhaseMemory(max(peak, before.peak_bytes) if before else peak, allocated[end - 1])
        start = end
    return memory


def categorize(spans: Sequence[AllocationSpan]) -> list[str]:
    """The category of every span.

    A label wins. Unlabelled memory from before the recording or the first step is `other`, made while
    preparing batches `inputs`. Born in forward and dead in backward is `activations`: with accumulation
    that means in or after the first backward that follows its birth, and what is still live when the
    recording ends counts too (a run that ended in forward, out of memory, was saving it). Everything
    else is `temporaries`.
    """
    backward = sorted(
        [span.born for span in spans if span.birth_phase == "backward"]
        + [span.died for span in spans if span.death_phase == "backward" and span.died is not None]
    )

    def reaches_backward(span: AllocationSpan) -> bool:
        if span.died is None:
            return True
        following = bisect_right(backward, span.born)
        return following < len(backward) and backward[following] <= span.died

    def category(span: AllocationSpan) -> str:
        if span.category is not None:
            return span.category
        if span.born == BEFORE_RECORDING or span.birth_phase in (None, "setup"):
            return "other"
        if span.birth_phase == "data":
            return "inputs"
        if span.birth_phase == "forward" and reaches_backward(span):
            return "activations"
        return "temporaries"

    return [category(span) for span in spans]


def breakdown_at(spans: Sequence[AllocationSpan], index: int, baseline_bytes: int = 0) -> MemoryBreakdown:
    """The bytes live right after event `index`, by category. `baseline_bytes` goes to `other`."""
    totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    totals["other"] = baseline_bytes
    for span, category in zip(spans, categorize(spans), strict=True):
        if span.live_at(index):
            totals[category] += span.size_bytes
    return MemoryBreakdown(**{f"{name}_bytes": size for name, size in totals.items()})


def breakdown_at_peak(spans: Sequence[AllocationSpan], baseline_bytes: int = 0) -> MemoryBreakdown:
    """The breakdown at `find_peak`; its total is the peak's allocated_bytes."""
    return breakdown_at(spans, find_peak(spans).index, baseline_bytes)


def breakdowns_at_peaks(spans: Sequence[AllocationSpan], ends: Sequence[int]) -> list[MemoryBreakdown]:
    """The breakdown at the first peak of each step, what was there as it began included. `ends`: the last
    event of each, one after the other.
    """
    allocated, _ = _timeline(spans, 0)
    slots = [0, *(min(end + 1, len(allocated) - 1) for end in ends)]  # after the last, a trace may go on
    peaks = [max(range(start, end + 1), key=allocated.__getitem__) - 1 for start, end in pairwise(slots)]
    totals = [dict.fromkeys(CATEGORIES, 0) for _ in peaks]
    for span, category in zip(spans, categorize(spans), strict=True):
        until = len(peaks) if span.died is None else bisect_left(peaks, span.died)
        for step in range(bisect_left(peaks, span.born), until):
            totals[step][category] += span.size_bytes
    return [MemoryBreakdown(**{f"{name}_bytes": size for name, size in sums.items()}) for sums in totals]


def bytes_by_module(spans: Sequence[AllocationSpan], index: int, n: int = 200) -> dict[str, int]:
    """The bytes live right after event `index` by module path, largest first; they add up to all of them.

    The `n` largest modules by name, then what the others hold together, and what belongs to none.
    """
    totals: dict[str, int] = {}
    for span in spans:
        if span.live_at(index):
            totals[span.module or ""] = totals.get(span.module or "", 0) + span.size_bytes
    nobody = totals.pop("", 0)
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    rest = {"(other modules)": sum(size for _, size in ordered[n:]), "(no module)": nobody}
    return dict(ordered[:n]) | {name: size for name, size in rest.items() if size}


def top_allocations(spans: Sequence[AllocationSpan], index: int, n: int = 20) -> list[Allocation]:
    """The `n` largest allocations live right after event `index`, largest first, then oldest first."""
    live = [
        (span, category)
        for span, category in zip(spans, categorize(spans), strict=True)
        if span.live_at(index)
    ]
    return [
        Allocation(
            size_bytes=span.size_bytes,
            category=category,
            phase=span.birth_phase,
            module=span.module,
            stack=[stack_line(frame) for frame in span.frames],
        )
        for span, category in nlargest(n, live, key=lambda entry: (entry[0].size_bytes, -entry[0].born))
    ]


def _timeline(spans: Sequence[AllocationSpan], baseline_bytes: int) -> tuple[list[int], list[str | None]]:
    """Bytes allocated after each event, and the event's phase. Slot 0 is before event 0."""
    last = max((max(span.born, span.died or 0) for span in spans), default=BEFORE_RECORDING)
    changes = [0] * (last + 2)
    phases: list[str | None] = [None] * (last + 2)
    changes[0] = baseline_bytes
    for span in spans:
        changes[span.born + 1] += span.size_bytes
        if span.born != BEFORE_RECORDING:
            phases[span.born + 1] = span.birth_phase
        if span.died is not None:
            changes[span.died + 1] -= span.size_bytes
            phases[span.died + 1] = span.death_phase
    # Events that are no allocation (a new segment) belong to the phase around them.
    carried = accumulate(phases, lambda before, phase: before if phase is None else phase)
    return list(accumulate(changes)), list(carried)
