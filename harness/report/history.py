"""The memory history of a snapshot as columns: one entry for each allocation and each free, in order.

Built on snapshot/attribution.py and snapshot/trace.py, in numpy where a million events would take Python too
long. Imports no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.report.groups import groups_of
from harness.report.stacks import CallTree
from harness.snapshot import (
    BEFORE_RECORDING,
    AllocationSpan,
    OutOfMemory,
    Recording,
    Segment,
    devices_in,
    name_by_size,
    recording_of,
    segments_at,
)
from harness.step_profile import CATEGORIES, PHASES_BETWEEN_STEPS, MemoryBreakdown

SINCE_1970_US = 10**15
"""Of September 2001: a real clock says more, a count of events less."""
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class PhaseRun(NamedTuple):
    """A stretch of events of one phase; `phase` is None where the recording names none."""

    phase: str | None
    start: int
    end: int
    """The event after the last."""


class Before(NamedTuple):
    """What was allocated when the recording began: an entry for each allocation, in no order."""

    size_bytes: NDArray[np.int64]
    group: NDArray[np.uint8]
    stack: NDArray[np.uint32]
    module: NDArray[np.uint32]
    freed: NDArray[np.int64]
    """The event that freed it; -1 for what is there to the end."""


@dataclass
class History:
    """What was allocated and freed on one device. Sizes are bytes, events count from 0.

    A snapshot without a trace has no events: all it holds was there before.
    """

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
    modules: tuple[str, ...]
    """Paths of the modules that allocations belong to; "" where none is known."""
    module: NDArray[np.uint32]
    """At each event, the index of the allocation's."""
    partner: NDArray[np.int64]
    """At each event, the one that frees what it allocates or allocated what it frees; -1 for none."""
    before: Before
    time_us: NDArray[np.int64] | None
    """At each event, microseconds since the first; None where the recording has no times."""
    time_is_estimated: bool
    """Whether they are `estimated_times_us`, and no clock's."""
    trace_index: NDArray[np.int64]
    """At each event, the entry of the trace."""
    tree: CallTree
    phases: list[PhaseRun]
    segments_then: list[Segment]
    """What the allocator held of the device's memory at `moment`."""
    reserved_bytes: NDArray[np.int64]
    """After each event; as allocated where there is no allocator (live CPU tensors)."""
    reserved_at_end_bytes: int
    oom: OutOfMemory | None
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

    def moment(self) -> tuple[int, int]:
        """(event, allocated bytes) of what a report is about: where memory ran out last; else the peak."""
        if self.oom is None:
            return self.peak()
        event = int(np.searchsorted(self.trace_index, self.oom.index)) - 1
        return event, int(self.baseline_bytes.sum() + self.change_bytes[: event + 1].sum())

    def phase(self) -> str | None:
        """The phase of `moment`; None where the recording names none."""
        event, _ = self.moment()
        return next((run.phase for run in self.phases if run.start <= event < run.end), None)

    def held(self) -> dict[str, int]:
        """Bytes at `moment` by group, the most first, without those of nothing; they add up to it."""
        event, _ = self.moment()
        sizes = self.by_group()[:, event] if event >= 0 else self.baseline_bytes
        held = sorted(zip(sizes.tolist(), self.groups, strict=True), key=lambda item: -item[0])
        return {name: size for size, name in held if size}

    @property
    def when(self) -> str:
        """`moment` in words."""
        if self.oom is not None:
            return "when memory ran out"
        return "at the peak" if self.events else "when the snapshot was taken"

    def live_at(self, event: int) -> list[AllocationSpan]:
        """The allocations live right after an event (-1: before the first)."""
        moment = int(self.trace_index[event]) if event >= 0 else BEFORE_RECORDING
        return [span for span in self.spans if span.live_at(moment)]


def history_of(
    snapshot: Mapping[str, Any], at_peak: MemoryBreakdown | None = None, device: int | None = None
) -> History | None:
    """The history in a snapshot of checked shape (snapshot/safe_read.py); None if there is nothing in it.

    `at_peak` is that of the same run's profile: what the recording found there already carries no
    category in a snapshot, and is what the profile's categories have beyond the recorded ones.
    `device`: which one; otherwise `chosen_device` chooses. Raises InputError for one that is not there.
    """
    recording = recording_of(snapshot, device)
    trace, segments, spans = recording.trace, recording.segments, recording.spans
    if not segments and not spans:
        return None
    name_by_size(spans)
    born = np.array([span.born for span in spans], np.int64)
    died = np.array([-1 if span.died is None else span.died for span in spans], np.int64)
    sizes = np.array([span.size_bytes for span in spans], np.int64)
    births, deaths = np.flatnonzero(born >= 0), np.flatnonzero(died >= 0)
    of_span = np.concatenate([births, deaths])
    at = np.concatenate([born[births], died[deaths]])
    changes = np.concatenate([sizes[births], -sizes[deaths]])
    order = np.lexsort((changes > 0, at))  # an address given again without a free: the old one goes first
    of_span, at, changes = of_span[order], at[order], changes[order]
    groups, codes, by_category = groups_of(recording)
    tree = CallTree()
    stacks = np.array([tree.node_of(span.frames) for span in spans], np.uint32)
    modules = tuple(dict.fromkeys(span.module or "" for span in spans))
    place_of = {name: i for i, name in enumerate(modules)}
    module = np.array([place_of[span.module or ""] for span in spans], np.uint32)
    which: Iterable[tuple[int, bool]] = zip(of_span.tolist(), (changes > 0).tolist(), strict=True)
    there_before = born < 0
    baseline = np.bincount(codes[there_before], sizes[there_before], len(groups)).astype(np.int64)
    birth_event, death_event = _event_by_span(of_span, changes, len(spans))
    history = History(
        device=recording.device,
        spans=spans,
        group_of_span=codes,
        groups=groups,
        by_category=by_category,
        baseline_bytes=baseline,
        change_bytes=changes,
        group=codes[of_span],
        stack=stacks[of_span],
        modules=modules,
        module=module[of_span],
        partner=np.where(changes > 0, death_event[of_span], birth_event[of_span]),
        before=Before(
            sizes[there_before],
            codes[there_before],
            stacks[there_before],
            module[there_before],
            death_event[there_before],
        ),
        time_us=_times(trace, at),
        time_is_estimated=False,
        trace_index=at,
        tree=tree,
        phases=_phase_runs([spans[s].birth_phase if birth else spans[s].death_phase for s, birth in which]),
        segments_then=[],
        reserved_bytes=_reserved(trace, segments, at),
        reserved_at_end_bytes=sum(segment["total_size"] for segment in segments),
        oom=recording.oom,
        notes=_notes(snapshot, recording),
    )
    event, _ = history.moment()
    moment = int(at[event]) if event >= 0 else BEFORE_RECORDING if len(at) else len(trace)
    history.segments_then = segments_at(trace, segments, history.oom.index if history.oom else moment)
    if by_category and at_peak is not None:
        _explain_baseline(history, at_peak)
    return history


def _event_by_span(
    of_span: NDArray[np.int64], changes: NDArray[np.int64], spans: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The events at which each span was allocated and freed; -1 for none."""
    births, deaths = np.full(spans, -1, np.int64), np.full(spans, -1, np.int64)
    events = np.arange(len(of_span))
    births[of_span[changes > 0]] = events[changes > 0]
    deaths[of_span[changes < 0]] = events[changes < 0]
    return births, deaths


def _times(trace: Sequence[Mapping[str, Any]], at: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Since the first event. None where there are none (before PyTorch 2.2), or they only count."""
    if not len(at):
        return None
    times = np.array([entry.get("time_us", 0) for entry in trace], np.int64)
    if times.min() < SINCE_1970_US or (np.diff(times) < 0).any():
        return None
    return times[at] - times[at[0]]


def estimated_times_us(history: History, phases_s: Mapping[str, float | None]) -> NDArray[np.int64] | None:
    """When each event of one step would be, in microseconds: each phase takes the seconds of `phases_s`, its
    events at equal distances. None where a phase of the history has no estimate.
    """
    takes_us = np.zeros(history.events)
    for phase in {run.phase for run in history.phases}:
        seconds = phases_s.get(phase or "")
        if seconds is None:
            return None
        of_phase = [np.arange(run.start, run.end) for run in history.phases if run.phase == phase]
        events = np.concatenate(of_phase)
        takes_us[events] = seconds * 1e6 / len(events)
    return (np.cumsum(takes_us) - takes_us).astype(np.int64) if history.events else None


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


def _notes(snapshot: Mapping[str, Any], recording: Recording) -> list[str]:
    notes: list[str] = []
    devices = devices_in(snapshot)
    if len(devices) > 1:
        there = ", ".join(map(str, devices))
        this = f"This is device {recording.device}; --device N shows another."
        notes.append(f"The snapshot has these devices: {there}. {this}")
    if recording.from_stacks:
        notes.append(
            "Phases and categories are read from the stacks (a module's call, backward, an optimizer, a data "
            "loader): the recording states none."
        )
    elif recording.categories is None:
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
    stated = np.array([size or 0 for size in at_peak.by_category().values()], np.int64)
    missing = stated - recorded[:before]
    # The allocator's counter has the rounding that a trace does not show, which profiles add to `other`.
    missing[CATEGORIES.index("other")] -= missing.sum() - history.baseline_bytes[before]
    if (missing < 0).any():
        history.notes.append(
            "The profile's categories do not fit the recording: what was there before it stays unexplained."
        )
        return
    history.baseline_bytes = np.append(history.baseline_bytes[:before] + missing, 0)
