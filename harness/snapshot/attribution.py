"""Says what each allocation is, and what the memory at the peak is made of.

A recording is a chronological list of events of one device. An allocation lives from the event that
made it up to, and without, the event that freed it. Two producers give the same `AllocationSpan`s: a
CUDA allocator trace (`snapshot/trace.py`), and a tracker of storages (the simulator, or live CPU tensors).
This module imports no torch.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, pairwise
from typing import Any

from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan
from harness.snapshot.stacks import NO_STACK, gathers, place_of, stack_line
from harness.step_profile import CATEGORIES, Allocation, MemoryBreakdown

AS_LARGE = "(as large as what"
"""The names that `name_by_size` gives begin with this."""
LEAST_NAMED_BYTES = 2**20
"""The smallest allocation that `name_by_size` names: many tensors share a smaller size by chance."""
MOST_MODULES = 200
"""How many modules `bytes_by_module` names, and how many kinds of the others; what is left is one sum."""


@dataclass(frozen=True)
class Peak:
    """The first moment with the most bytes allocated."""

    index: int
    """The event that reached it; BEFORE_RECORDING when memory only fell."""
    allocated_bytes: int
    phase: str | None


def find_peak(spans: Sequence[AllocationSpan], leave_out: Collection[str] = ()) -> Peak:
    """The peak over the recording, except for the phases to `leave_out`."""
    allocated, phases = _timeline(spans, leave_out)
    most = max(allocated)
    slot = allocated.index(most)
    return Peak(slot - 1, most, phases[slot])


def categorize(spans: Sequence[AllocationSpan]) -> list[str]:
    """The category of every span.

    A label decides, except that what FSDP2 gathers, as its stack shows, is `gathered_parameters`: where
    memory runs out within a unit, its gathered weights are labelled as the model's parameters. Memory without
    a label is `other` if it is from before the recording or the first step, and `inputs` if it was made while
    batches were prepared. What is made in forward and freed in backward is `activations`: with accumulation
    that means in or after the first backward that follows, and what is still live when the recording ends
    counts too (a run that ended in forward, out of memory, was saving it). Everything else is `temporaries`.
    """
    backward = sorted(
        [span.born for span in spans if span.birth_phase == "backward"]
        + [span.died for span in spans if span.death_phase == "backward" and span.died is not None]
    )

    gathering = {id(span.frames): gathers(span.frames) for span in spans if span.frames}

    def reaches_backward(span: AllocationSpan) -> bool:
        if span.died is None:
            return True
        following = bisect_right(backward, span.born)
        return following < len(backward) and backward[following] <= span.died

    def category(span: AllocationSpan) -> str:
        if gathering.get(id(span.frames)) and span.category in (None, "parameters"):
            return "gathered_parameters"
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


def name_by_size(spans: Iterable[AllocationSpan]) -> None:
    """Where autograd made an allocation in backward and its module is not known, name a place in `module`:
    that of the last allocation of as many bytes in the forward before.

    Its own stack tells nothing: it ends at the call of backward, or autograd's own thread has none. A
    gradient is as large as its tensor, and autograd goes backward: the tensor made last is the likeliest.
    """
    made: dict[int, str] = {}
    for span in sorted(spans, key=lambda span: span.born):
        if span.size_bytes < LEAST_NAMED_BYTES or span.born == BEFORE_RECORDING:
            continue
        where = place_of(span.frames)
        if span.birth_phase == "forward" and where != NO_STACK:
            made[span.size_bytes] = where
        elif span.birth_phase == "backward" and not span.module and span.size_bytes in made:
            by_autograd = where == NO_STACK or "/torch/autograd/" in span.frames[0]["filename"]
            if by_autograd and span.category in (None, "temporaries"):
                span.module = f"{AS_LARGE} {made[span.size_bytes]} made)"


def breakdown_at(spans: Sequence[AllocationSpan], index: int) -> MemoryBreakdown:
    """The bytes live right after event `index`, by category."""
    totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for span, category in zip(spans, categorize(spans), strict=True):
        if span.live_at(index):
            totals[category] += span.size_bytes
    return MemoryBreakdown(**{f"{name}_bytes": size for name, size in totals.items()})


def breakdowns_at_peaks(
    spans: Sequence[AllocationSpan], ends: Sequence[int], leave_out: Collection[str] = ()
) -> list[MemoryBreakdown]:
    """The breakdown at the first peak of each step, memory from before the step included. `ends`: the index
    of each step's last event, in order. `leave_out`: phases in which no peak is looked for.
    """
    allocated, _ = _timeline(spans, leave_out)
    slots = [0, *(min(end + 1, len(allocated) - 1) for end in ends)]  # after the last, a trace may go on
    peaks = [max(range(start, end + 1), key=allocated.__getitem__) - 1 for start, end in pairwise(slots)]
    totals: list[dict[str, int]] = [dict.fromkeys(CATEGORIES, 0) for _ in peaks]
    for span, category in zip(spans, categorize(spans), strict=True):
        until = len(peaks) if span.died is None else bisect_left(peaks, span.died)
        for step in range(bisect_left(peaks, span.born), until):
            totals[step][category] += span.size_bytes
    return [MemoryBreakdown(**{f"{name}_bytes": size for name, size in sums.items()}) for sums in totals]


def bytes_by_module(spans: Sequence[AllocationSpan], index: int) -> dict[str, int]:
    """The bytes live right after event `index` by module path, largest first; they add up to all of them.

    The MOST_MODULES largest by name, the others by their kind (`layers.*.mlp`), and what belongs to none.
    """
    totals: Counter[str] = Counter()
    for span in spans:
        if span.live_at(index):
            totals[span.module or ""] += span.size_bytes
    without_module = totals.pop("", 0)
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    kinds = by_kind_of_module(dict(ordered[MOST_MODULES:]))
    named = kinds.most_common(MOST_MODULES)
    rest = {"(other modules)": kinds.total() - sum(size for _, size in named), "(no module)": without_module}
    by_size = sorted([*ordered[:MOST_MODULES], *named], key=lambda item: (-item[1], item[0]))
    return dict(by_size) | {name: size for name, size in rest.items() if size}


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


def _timeline(
    spans: Sequence[AllocationSpan], leave_out: Collection[str] = ()
) -> tuple[list[int], list[str | None]]:
    """Bytes allocated after each event, and the event's phase; 0 bytes in a phase to `leave_out`. Slot 0 is
    before event 0.
    """
    last = max((max(span.born, span.died or 0) for span in spans), default=BEFORE_RECORDING)
    changes = [0] * (last + 2)
    phases: list[str | None] = [None] * (last + 2)
    for span in spans:
        changes[span.born + 1] += span.size_bytes
        if span.born != BEFORE_RECORDING:
            phases[span.born + 1] = span.birth_phase
        if span.died is not None:
            changes[span.died + 1] -= span.size_bytes
            phases[span.died + 1] = span.death_phase
    # Events that are no allocation (a new segment) belong to the phase around them.
    for slot, phase in enumerate(phases[1:], 1):
        phases[slot] = phases[slot - 1] if phase is None else phase
    totals = accumulate(changes)
    return [0 if p in leave_out else n for n, p in zip(totals, phases, strict=True)], phases


def by_kind_of_module(taken: Mapping[str, Any]) -> Counter[str]:
    """Sums of `taken` (bytes or seconds by a module's path) over the layers of one kind."""
    found: Counter[str] = Counter()
    for module, amount in taken.items():
        found[module_of_its_kind(module)] += amount
    return found


def module_of_its_kind(module: str) -> str:
    """A module's path with `*` for the number of its layer, the same for all layers of one kind."""
    return re.sub(r"(^|\.)\d+\b", r"\1*", module)
