"""The memory history of a snapshot as columns: one entry for each allocation and each free, in order.

It is built on snapshot/attribution.py and snapshot/trace.py, in numpy because a million events would take
Python too long. Imports no torch.
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
"""A time in September 2001: a trace whose times are smaller counts its events instead of reading a clock."""
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""The actions of a trace by which reserved memory grows (1) and shrinks (-1)."""


class PhaseRun(NamedTuple):
    """A run of events in one phase; `phase` is None where the recording names none."""

    phase: str | None
    start: int
    end: int
    """The event after the last."""


class Before(NamedTuple):
    """What was allocated when the recording began, with one entry for each allocation, in no order.

    `group`, `stack` and `module` are as in History."""

    size_bytes: NDArray[np.int64]
    group: NDArray[np.uint8]
    stack: NDArray[np.uint32]
    module: NDArray[np.uint32]
    freed: NDArray[np.int64]
    """The event that frees it; -1 for what is never freed."""


@dataclass
class History:
    """What was allocated and freed on one device. Each allocation and each free is an event, counted from 0.

    A snapshot without a trace has no events: all that it holds counts as allocated before the recording.
    """

    device: int
    """The index of the device."""
    spans: list[AllocationSpan]
    """Every allocation, from its beginning to its end."""
    group_of_span: NDArray[np.uint8]
    """The group of each span, as an index of `groups`."""
    groups: tuple[str, ...]
    """The groups by which the timeline is stacked: categories, or places in the code."""
    by_category: bool
    """Whether the groups are categories."""
    baseline_bytes: NDArray[np.int64]
    """The bytes of each group that were allocated when the recording began."""
    change_bytes: NDArray[np.int64]
    """The change in allocated bytes at each event: positive for an allocation, negative for a free."""
    group: NDArray[np.uint8]
    """The group of the memory that each event allocates or frees, as an index of `groups`."""
    stack: NDArray[np.uint32]
    """The stack by which that memory was allocated, as a node of `tree`."""
    modules: tuple[str, ...]
    """The paths of the modules that allocations belong to; "" where none is known."""
    module: NDArray[np.uint32]
    """The module that the memory of each event belongs to, as an index of `modules`."""
    partner: NDArray[np.int64]
    """For an allocation the event that frees it, for a free the event that allocated it; -1 for none."""
    before: Before
    """The allocations from before the recording, which no event allocates."""
    time_us: NDArray[np.int64] | None
    """The time of each event in microseconds since the first; None where the recording has no times."""
    time_is_estimated: bool
    """Whether the times are those of `estimated_times_us` and not of a clock."""
    trace_index: NDArray[np.int64]
    """The entry of the snapshot's trace that each event is."""
    tree: CallTree
    """The stacks of all allocations."""
    phases: list[PhaseRun]
    """The phases of the events, in order."""
    segments_then: list[Segment]
    """The segments that the allocator had reserved at `moment`."""
    reserved_bytes: NDArray[np.int64]
    """The reserved bytes after each event. They are the allocated ones where there is no caching allocator,
    as for tensors on a CPU."""
    reserved_at_end_bytes: int
    """The reserved bytes when the snapshot was taken."""
    oom: OutOfMemory | None
    """The last time that memory ran out; None where it never did."""
    notes: list[str]
    """Sentences about how the history was read."""

    @property
    def events(self) -> int:
        """The number of events."""
        return len(self.change_bytes)

    def allocated_bytes(self) -> NDArray[np.int64]:
        """The allocated bytes after each event."""
        return self.baseline_bytes.sum() + np.cumsum(self.change_bytes)

    def by_group(self) -> NDArray[np.int64]:
        """The allocated bytes of each group after each event, of shape (groups, events)."""
        changes = np.zeros((len(self.groups), self.events), np.int64)
        changes[self.group, np.arange(self.events)] = self.change_bytes
        return self.baseline_bytes[:, None] + np.cumsum(changes, axis=1)

    def peak(self) -> tuple[int, int]:
        """The event after which the most is allocated (the first of several), and these bytes. The event -1
        is the beginning of the recording."""
        allocated = self.allocated_bytes()
        start = int(self.baseline_bytes.sum())
        if not self.events or allocated.max() <= start:
            return -1, start
        event = int(allocated.argmax())
        return event, int(allocated[event])

    def moment(self) -> tuple[int, int]:
        """The moment that a report is about, as an event and the allocated bytes after it: where memory ran
        out last, or else the peak."""
        if self.oom is None:
            return self.peak()
        event = int(np.searchsorted(self.trace_index, self.oom.index)) - 1
        return event, int(self.baseline_bytes.sum() + self.change_bytes[: event + 1].sum())

    def phase(self) -> str | None:
        """The phase of `moment`; None where the recording names none."""
        event, _ = self.moment()
        return next((run.phase for run in self.phases if run.start <= event < run.end), None)

    def held(self) -> dict[str, int]:
        """The bytes of each group at `moment`, the most first; groups without any are left out."""
        event, _ = self.moment()
        sizes = self.by_group()[:, event] if event >= 0 else self.baseline_bytes
        held = sorted(zip(sizes.tolist(), self.groups, strict=True), key=lambda item: -item[0])
        return {name: size for size, name in held if size}

    @property
    def when(self) -> str:
        """What `moment` is, in words that follow a noun."""
        if self.oom is not None:
            return "when memory ran out"
        return "at the peak" if self.events else "when the snapshot was taken"

    def live_at(self, event: int) -> list[AllocationSpan]:
        """The allocations that are live right after an event, or for -1 when the recording began."""
        moment = int(self.trace_index[event]) if event >= 0 else BEFORE_RECORDING
        return [span for span in self.spans if span.live_at(moment)]


def history_of(
    snapshot: Mapping[str, Any], at_peak: MemoryBreakdown | None = None, device: int | None = None
) -> History | None:
    """The history in a snapshot of checked shape (snapshot/safe_read.py); None if there is nothing in it.

    `at_peak` is the memory at the peak by the same run's profile. A snapshot has no categories for what was
    allocated before the recording: they are what the profile's categories have more than the recorded ones.
    `device` is the index of the device; by default the one that `recording_of` chooses. Raises InputError for
    one that the snapshot does not have.
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
    order = np.lexsort((changes > 0, at))  # of one trace entry, a free comes before the new allocation
    of_span, at, changes = of_span[order], at[order], changes[order]
    groups, codes, by_category = groups_of(recording)
    tree = CallTree()
    stacks = np.array([tree.node_of(span.frames) for span in spans], np.uint32)
    modules = tuple(dict.fromkeys(span.module or "" for span in spans))
    place_of = {name: i for i, name in enumerate(modules)}
    module = np.array([place_of[span.module or ""] for span in spans], np.uint32)
    events: Iterable[tuple[int, bool]] = zip(of_span.tolist(), (changes > 0).tolist(), strict=True)
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
        phases=_phase_runs([spans[s].birth_phase if birth else spans[s].death_phase for s, birth in events]),
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
    """For each span the event that allocated it and the event that freed it; -1 for none."""
    births, deaths = np.full(spans, -1, np.int64), np.full(spans, -1, np.int64)
    events = np.arange(len(of_span))
    births[of_span[changes > 0]] = events[changes > 0]
    deaths[of_span[changes < 0]] = events[changes < 0]
    return births, deaths


def _times(trace: Sequence[Mapping[str, Any]], at: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The microseconds of each event since the first. None where the trace has no times (before PyTorch 2.2),
    and where they are no clock's."""
    if not len(at):
        return None
    times = np.array([entry.get("time_us", 0) for entry in trace], np.int64)
    if times.min() < SINCE_1970_US or (np.diff(times) < 0).any():
        return None
    return times[at] - times[at[0]]


def estimated_times_us(history: History, phases_s: Mapping[str, float | None]) -> NDArray[np.int64] | None:
    """Estimated times of the events of one step, in microseconds. A phase takes the seconds that `phases_s`
    has for it, with its events at equal distances. None where a phase has no estimate.
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
    """The runs of equal phases. An event without a phase belongs to the phase before it."""
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
    """The reserved bytes after each event.

    A segment that the trace reserves is counted with the allocation that follows, for which it was made, and
    one that it releases with the free before.
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
    """Sentences about which device is shown, and how phases and categories are known."""
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
    """The event of the peak before any evaluation or checkpoint; -1 for the beginning of the recording."""
    between = (run.start for run in history.phases if run.phase in PHASES_BETWEEN_STEPS)
    allocated = history.allocated_bytes()[: min(between, default=None)]
    if not len(allocated) or allocated.max() <= history.baseline_bytes.sum():
        return -1
    return int(allocated.argmax())


def _explain_baseline(history: History, at_peak: MemoryBreakdown) -> None:
    """Divide the bytes of the group BEFORE among the categories: each gets what the profile has of it at the
    peak of the steps beyond what was recorded."""
    if not history.baseline_bytes[len(CATEGORIES)]:
        return
    event = _peak_of_the_steps(history)
    recorded = history.by_group()[:, event] if event >= 0 else history.baseline_bytes
    before = len(CATEGORIES)
    stated = np.array([size or 0 for size in at_peak.by_category().values()], np.int64)
    missing = stated - recorded[:before]
    # profiles add to `other` the rounding of the allocator's counter, which a trace does not show
    missing[CATEGORIES.index("other")] -= missing.sum() - history.baseline_bytes[before]
    if (missing < 0).any():
        history.notes.append(
            "The profile's categories do not fit the recording: what was there before it stays unexplained."
        )
        return
    history.baseline_bytes = np.append(history.baseline_bytes[:before] + missing, 0)
