"""Where a simulated allocation sequence leaves a recorded one: the instrument that finds what is missing.

Both are memory-viz snapshots. The last whole step of each is cut into its runs of one phase, and each run is
aligned with its counterpart by what was allocated or freed and how much was requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from benchmarks.trace_diff.alignment import align
from harness.snapshot.spans import Frame
from harness.snapshot.stacks import place_of
from harness.snapshot.trace import phase_of, stated_phases, step_of

CONTEXT = 3


class Event(NamedTuple):
    """One entry of a trace that counts: memory was given out, or taken back."""

    entry: int
    """Its number in the trace."""
    action: Literal["alloc", "free"]
    size_bytes: int
    """Requested, not rounded to blocks."""
    phase: str | None
    step: int | None
    """The number of the step, where the trace names it."""
    frames: Sequence[Frame]

    @property
    def token(self) -> tuple[str, int]:
        """What makes two events the same."""
        return self.action, self.size_bytes

    @property
    def place(self) -> str:
        """`file:line function` of the innermost frame outside torch."""
        return place_of(self.frames)


@dataclass(frozen=True)
class Divergence:
    """Between two events that both have: what only one has."""

    phase: str
    before: list[Event]
    """The last events that both have (the recorded ones)."""
    only_real: list[Event]
    only_simulated: list[Event]

    @property
    def reordered(self) -> bool:
        """Whether both sides do the same in another order."""
        return Counter(e.token for e in self.only_real) == Counter(e.token for e in self.only_simulated)


@dataclass(frozen=True)
class PhaseDiff:
    """One run of a phase in both traces."""

    phase: str
    real_events: int
    simulated_events: int
    matching: int
    real_peak_bytes: int
    """Requested bytes at most, above those at the beginning of the step."""
    simulated_peak_bytes: int
    divergences: list[Divergence]
    aligned: bool
    """False: too different to align; everything between the equal beginning and end is one divergence."""


@dataclass(frozen=True)
class Group:
    """What one place in the code allocates in only one of the traces."""

    phase: str
    place: str
    size_bytes: int
    count: int

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.count


@dataclass(frozen=True)
class TraceDiff:
    """A recorded step against a simulated one."""

    phases: list[PhaseDiff]

    @property
    def divergences(self) -> list[Divergence]:
        """All of them, in order."""
        return [divergence for phase in self.phases for divergence in phase.divergences]

    @property
    def only_real(self) -> list[Group]:
        """Allocations that were not simulated in this phase, in any order; the most bytes first."""
        return _surplus(self.phases, "only_real", "only_simulated")

    @property
    def only_simulated(self) -> list[Group]:
        """Allocations that were not recorded in this phase, in any order; the most bytes first."""
        return _surplus(self.phases, "only_simulated", "only_real")


def diff_traces(real: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]) -> TraceDiff:
    """Compare the last step of each of two traces (snapshot["device_traces"][device]).

    A trace that names no phases (one that harness did not record) is compared whole, as one phase.
    """
    simulated_runs = _last_step(_events(simulated))
    recorded = _events(real)
    real_runs = _last_step(recorded, [phase for phase, _ in simulated_runs])
    if [phase for phase, _ in real_runs] != [phase for phase, _ in simulated_runs]:
        real_runs = [("whole trace", [e for _, events in real_runs for e in events])]
        simulated_runs = [("whole trace", [e for _, events in simulated_runs for e in events])]
    phases: list[PhaseDiff] = []
    real_bytes = simulated_bytes = 0
    for (phase, theirs), (_, ours) in zip(real_runs, simulated_runs, strict=True):
        alignment = align([e.token for e in theirs], [e.token for e in ours])
        real_peak, real_bytes = _peak_and_end(theirs, real_bytes)
        simulated_peak, simulated_bytes = _peak_and_end(ours, simulated_bytes)
        phases.append(
            PhaseDiff(
                phase=phase,
                real_events=len(theirs),
                simulated_events=len(ours),
                matching=sum(match.length for match in alignment.matches),
                real_peak_bytes=real_peak,
                simulated_peak_bytes=simulated_peak,
                divergences=_divergences(phase, theirs, ours, alignment.matches),
                aligned=alignment.complete,
            )
        )
    return TraceDiff(phases)


def _events(trace: Sequence[Mapping[str, Any]]) -> list[Event]:
    events: list[Event] = []
    for index, (entry, stated) in enumerate(zip(trace, stated_phases(trace), strict=True)):
        action = {"alloc": "alloc", "free_requested": "free"}.get(entry["action"])
        if action is not None:
            frames = entry.get("frames", ())
            phase, step = phase_of(stated), step_of(stated)
            events.append(Event(index, action, entry["size"], phase, step, frames))  # type: ignore[arg-type]
    return events


def _last_step(events: list[Event], wanted: list[str] | None = None) -> list[tuple[str, list[Event]]]:
    """(phase, events) of each run of one phase in the last step; the last one with the runs that are wanted.

    Where the trace does not number its steps, one begins with the first phase after an optimizer step. Setup
    is no part of one.
    """
    steps: list[list[tuple[str, list[Event]]]] = [[]]
    before: int | None = None
    for (number, phase), run in groupby(events, key=lambda event: (event.step, event.phase)):
        ended = steps[-1] and (steps[-1][-1][0] == "optimizer_step" if number is None else number != before)
        if ended:
            steps.append([])
        before = number
        if phase != "setup":
            steps[-1].append((phase or "whole trace", list(run)))
    fitting = [step for step in steps if [phase for phase, _ in step] == wanted]
    return (fitting or steps)[-1]


def _peak_and_end(events: Sequence[Event], start_bytes: int) -> tuple[int, int]:
    peak = now = start_bytes
    for event in events:
        now += event.size_bytes if event.action == "alloc" else -event.size_bytes
        peak = max(peak, now)
    return peak, now


def _divergences(phase: str, real: list[Event], simulated: list[Event], matches: Any) -> list[Divergence]:
    found: list[Divergence] = []
    i = j = 0
    for start, other_start, length in [*matches, (len(real), len(simulated), 0)]:
        if start > i or other_start > j:
            before = real[max(0, i - CONTEXT) : i]
            found.append(Divergence(phase, before, real[i:start], simulated[j:other_start]))
        i, j = start + length, other_start + length
    return found


def _surplus(phases: Sequence[PhaseDiff], side: str, other: str) -> list[Group]:
    """What `side` allocates more often than `other`, the most bytes first."""
    groups = [group for phase in phases for group in _surplus_of(phase, side, other)]
    return sorted(groups, key=lambda group: -group.total_bytes)


def _surplus_of(diff: PhaseDiff, side: str, other: str) -> list[Group]:
    """Of equal sizes those of equal place cancel first."""
    ours, theirs = (
        Counter(
            (event.size_bytes, event.place)
            for divergence in diff.divergences
            for event in getattr(divergence, name)
            if event.action == "alloc"
        )
        for name in (side, other)
    )
    elsewhere = Counter[int]()
    for (size_bytes, _), count in (theirs - ours).items():
        elsewhere[size_bytes] += count
    groups: list[Group] = []
    for (size_bytes, place), count in (ours - theirs).items():
        cancelled = min(count, elsewhere[size_bytes])
        elsewhere[size_bytes] -= cancelled
        if count > cancelled:
            groups.append(Group(diff.phase, place, size_bytes, count - cancelled))
    return groups
