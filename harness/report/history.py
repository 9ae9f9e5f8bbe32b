"""The memory history of a snapshot as columns: one entry for each allocation and each free, in order.

Built on snapshot/attribution.py and snapshot/trace.py, in numpy where a million events would take Python too
long. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.report.segments import Segment, segments_at
from harness.report.stacks import CallTree, place
from harness.snapshot import (
    BEFORE_RECORDING,
    MIN_BLOCK_BYTES,
    AllocationSpan,
    busiest_device,
    categorize,
    find_peak,
    spans_from_trace,
)
from harness.step_profile import CATEGORIES, PHASES_BETWEEN_STEPS, MemoryBreakdown

BEFORE = "before the recording"
"""Memory that was there already and of which nobody says what it is."""
OTHER_CODE = "other code"
PLACES = 6
"""A recording without phases is coloured by the code that allocates most: so many places."""
_RECORDED = ("alloc", "free_requested")
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class PhaseRun(NamedTuple):
    """A stretch of events of one phase; `phase` is None where the recording names none."""

    phase: str | None
    start: int
    end: int
    """The event after the last."""


@dataclass
class History:
    """What was allocated and freed on one device. Sizes are bytes, events count from 0."""

    device: int
    spans: list[AllocationSpan]
    group_of_span: NDArray[np.uint8]
    groups: tuple[str, ...]
    """What the timeline is stacked by: categories, or places in the code."""
    by_category: bool
    baseline_bytes: NDArray[np.int64]
    """By group: allocated when the recording began."""
    change_bytes: NDArray[np.int64]
    """At each event: positive for an allocation, negative for a free."""
    group: NDArray[np.uint8]
    stack: NDArray[np.uint32]
    """At each event, the node of `tree` where the memory was allocated."""
    trace_index: NDArray[np.int64]
    """At each event, the entry of the trace."""
    tree: CallTree
    phases: list[PhaseRun]
    segments_at_peak: list[Segment]
    """What the allocator held of the device's memory when the most was allocated."""
    reserved_bytes: NDArray[np.int64]
    """After each event; as allocated where there is no allocator (live CPU tensors)."""
    notes: list[str]

    @property
    def events(self) -> int:
        return len(self.change_bytes)

    def allocated_bytes(self) -> NDArray[np.int64]:
        """After each event."""
        return self.baseline_bytes.sum() + np.cumsum(self.change_bytes)

    def by_group(self) -> NDArray[np.int64]:
        """Bytes by (group, event): every column adds up to `allocated_bytes`."""
        changes = np.zeros((len(self.groups), self.events), np.int64)
        changes[self.group, np.arange(self.events)] = self.change_bytes
        return self.baseline_bytes[:, None] + np.cumsum(changes, axis=1)

    def peak(self) -> tuple[int, int]:
        """(event, allocated bytes) of the first largest moment; event -1 is before the first."""
        allocated = self.allocated_bytes()
        start = int(self.baseline_bytes.sum())
        if not self.events or allocated.max() <= start:
            return -1, start
        event = int(allocated.argmax())
        return event, int(allocated[event])

    def live_at(self, event: int) -> list[AllocationSpan]:
        """The allocations live right after an event (-1: before the first)."""
        moment = int(self.trace_index[event]) if event >= 0 else BEFORE_RECORDING
        return [span for span in self.spans if span.live_at(moment)]


def history_of(snapshot: Mapping[str, Any], at_peak: MemoryBreakdown | None = None) -> History | None:
    """The history in a snapshot of checked shape (snapshot/safe_read.py); None if it recorded no allocation.

    `at_peak` is that of the same run's profile: what the recording found there already carries no
    category in a snapshot, and is what the profile's categories have beyond the recorded ones.
    """
    traces = snapshot["device_traces"]
    if not any(entry["action"] in _RECORDED for trace in traces for entry in trace):
        return None
    device = busiest_device(snapshot)
    trace = snapshot["device_traces"][device]
    segments = [segment for segment in snapshot["segments"] if segment.get("device", device) == device]
    round_to = MIN_BLOCK_BYTES if _in_blocks(trace, segments) else 1
    spans = spans_from_trace(trace, segments=segments, round_to_bytes=round_to)
    born = np.array([span.born for span in spans], np.int64)
    died = np.array([-1 if span.died is None else span.died for span in spans], np.int64)
    sizes = np.array([span.size_bytes for span in spans], np.int64)
    births, deaths = np.flatnonzero(born >= 0), np.flatnonzero(died >= 0)
    of_span = np.concatenate([births, deaths])
    at = np.concatenate([born[births], died[deaths]])
    changes = np.concatenate([sizes[births], -sizes[deaths]])
    order = np.argsort(at, kind="stable")
    of_span, at, changes = of_span[order], at[order], changes[order]
    groups, codes, by_category = _groups(trace, spans)
    tree = CallTree()
    stacks = np.array([tree.node_of(span.frames) for span in spans], np.uint32)
    which = zip(of_span.tolist(), (changes > 0).tolist(), strict=True)
    there_before = born < 0
    baseline = np.bincount(codes[there_before], sizes[there_before], len(groups)).astype(np.int64)
    history = History(
        device=device,
        spans=spans,
        group_of_span=codes,
        groups=groups,
        by_category=by_category,
        baseline_bytes=baseline,
        change_bytes=changes,
        group=codes[of_span],
        stack=stacks[of_span],
        trace_index=at,
        tree=tree,
        phases=_phase_runs([spans[s].birth_phase if birth else spans[s].death_phase for s, birth in which]),
        segments_at_peak=[],
        reserved_bytes=_reserved(trace, segments, at),
        notes=_notes(snapshot, device, by_category),
    )
    event, _ = history.peak()
    moment = int(at[event]) if event >= 0 else BEFORE_RECORDING
    history.segments_at_peak = segments_at(trace, segments, moment)
    if by_category and at_peak is not None:
        _explain_baseline(history, at_peak)
    return history


def _in_blocks(trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the addresses are those of an allocator's blocks; storages lie anywhere."""
    addresses = [segment["address"] for segment in segments]
    addresses += [entry["addr"] for entry in trace if entry["action"] == "alloc"]
    return not any(address % MIN_BLOCK_BYTES for address in addresses)


def _groups(
    trace: Sequence[Mapping[str, Any]], spans: Sequence[AllocationSpan]
) -> tuple[tuple[str, ...], NDArray[np.uint8], bool]:
    """The groups, the group of every span, and whether they are categories."""
    labelled = [_label(trace, span) for span in spans]
    if any(labelled):
        names = [
            label or (BEFORE if span.born < 0 else "other")
            for label, span in zip(labelled, spans, strict=True)
        ]
    elif any(span.birth_phase for span in spans):
        found = zip(categorize(spans), spans, strict=True)
        names = [BEFORE if span.born < 0 else category for category, span in found]
    else:
        return _by_place(spans)
    groups = (*CATEGORIES, BEFORE)
    code = {name: i for i, name in enumerate(groups)}
    return groups, np.array([code[name] for name in names], np.uint8), True


def _label(trace: Sequence[Mapping[str, Any]], span: AllocationSpan) -> str | None:
    index = span.died if span.born < 0 else span.born
    category = None if index is None else trace[index].get("category")
    return category if category in CATEGORIES else None


def _by_place(spans: Sequence[AllocationSpan]) -> tuple[tuple[str, ...], NDArray[np.uint8], bool]:
    places: dict[int, str] = {}
    moment = find_peak(spans).index
    at_peak: dict[str, int] = {}
    for span in spans:
        if span.born >= 0:
            name = places.setdefault(id(span.frames), "") or place(span.frames)
            places[id(span.frames)] = name
            at_peak[name] = at_peak.get(name, 0) + span.size_bytes * span.live_at(moment)
    largest = sorted(at_peak, key=lambda name: (-at_peak[name], name))[:PLACES]
    groups = (*largest, OTHER_CODE, BEFORE)
    code = {name: i for i, name in enumerate(groups)}
    rest = code[OTHER_CODE]
    codes = [code[BEFORE] if span.born < 0 else code.get(places[id(span.frames)], rest) for span in spans]
    return groups, np.array(codes, np.uint8), False


def _phase_runs(phases: Sequence[str | None]) -> list[PhaseRun]:
    """An event without a phase belongs to the one around it."""
    runs: list[PhaseRun] = []
    start = 0
    for phase, events in groupby(phases):
        end = start + sum(1 for _ in events)
        if runs and phase in (None, runs[-1].phase):
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(PhaseRun(phase, start, end))
        start = end
    return runs


def _reserved(
    trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], at: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Reserved bytes after each event.

    A segment is made for the allocation that follows, and given back after the free before it.
    """
    actions = [
        (i, entry["size"], _SEGMENTS[entry["action"]])
        for i, entry in enumerate(trace)
        if entry["action"] in _SEGMENTS
    ]
    changes = np.zeros(len(at) + 1, np.int64)
    for i, size, sign in actions:
        event = np.searchsorted(at, i) if sign > 0 else max(0, np.searchsorted(at, i) - 1)
        changes[event] += sign * size
    at_end = sum(segment["total_size"] for segment in segments)
    return at_end - changes.sum() + np.cumsum(changes)[:-1]


def _notes(snapshot: Mapping[str, Any], device: int, by_category: bool) -> list[str]:
    notes = []
    others = [i for i, trace in enumerate(snapshot["device_traces"]) if trace and i != device]
    if others:
        notes.append(
            f"The snapshot has traces of {len(others) + 1} devices. This is device {device}, the busiest."
        )
    if not by_category:
        notes.append(
            "The recording names no phases, so nobody can say what is an activation or a gradient: bytes are "
            "grouped by the code that allocated them."
        )
    return notes


def _peak_of_the_steps(history: History) -> int:
    """The event of the first largest moment before any evaluation or checkpoint; -1 is before the first."""
    between = (run.start for run in history.phases if run.phase in PHASES_BETWEEN_STEPS)
    allocated = history.allocated_bytes()[: min(between, default=None)]
    if not len(allocated) or allocated.max() <= history.baseline_bytes.sum():
        return -1
    return int(allocated.argmax())


def _explain_baseline(history: History, at_peak: MemoryBreakdown) -> None:
    """Move BEFORE's bytes to categories: what the profile has at the peak and the recording does not."""
    if not history.baseline_bytes[len(CATEGORIES)]:
        return
    event = _peak_of_the_steps(history)
    recorded = history.by_group()[:, event] if event >= 0 else history.baseline_bytes
    before = len(CATEGORIES)
    stated = np.array([getattr(at_peak, f"{name}_bytes") or 0 for name in CATEGORIES], np.int64)
    missing = stated - recorded[:before]
    # The allocator's counter has the rounding that a trace does not show, which profiles add to `other`.
    missing[CATEGORIES.index("other")] -= missing.sum() - history.baseline_bytes[before]
    if (missing < 0).any():
        history.notes.append(
            "The profile's categories do not fit the recording: what was there before it stays unexplained."
        )
        return
    history.baseline_bytes = np.append(history.baseline_bytes[:before] + missing, 0)
