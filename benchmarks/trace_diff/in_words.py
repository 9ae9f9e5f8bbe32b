"""A trace diff as lines of text."""

from collections.abc import Iterator, Sequence

from benchmarks.trace_diff.traces import Divergence, Event, Group, TraceDiff
from harness.units import in_gib

SHOWN_DIVERGENCES = 10
SHOWN_EVENTS = 6
SHOWN_GROUPS = 15


def trace_diff_lines(diff: TraceDiff) -> Iterator[str]:
    """Phases, the first divergences with their surroundings, what only one side has."""
    yield from _phase_lines(diff)
    yield from _divergence_lines(diff)
    yield from _group_lines(diff)


def _phase_lines(diff: TraceDiff) -> Iterator[str]:
    yield "phase             recorded  simulated   matching  divergences  peak above start"
    for p in diff.phases:
        counts = f"{p.real_events:>8,}  {p.simulated_events:>9,}  {p.matching:>9,}  {len(p.divergences):>11,}"
        missing = p.real_peak_bytes - p.simulated_peak_bytes
        peak = f"{in_gib(p.real_peak_bytes)} recorded" + (
            f", {abs(missing):,} bytes {'more' if missing > 0 else 'less'} than simulated"
            if missing
            else ", and simulated"
        )
        yield f"{p.phase:16}  {counts}  {peak}{'' if p.aligned else ' (too different to align)'}"


def _divergence_lines(diff: TraceDiff) -> Iterator[str]:
    found = diff.divergences
    if not found:
        yield "no divergence: the same allocations and frees in the same order"
        return
    reordered = sum(d.reordered for d in found)
    yield f"{len(found)} divergences, {reordered} of them the same events in another order; the first:"
    for number, divergence in enumerate(found[:SHOWN_DIVERGENCES], 1):
        yield f"{number}. {divergence.phase}{', only another order' if divergence.reordered else ''}"
        yield from _events_of(divergence)


def _events_of(divergence: Divergence) -> Iterator[str]:
    sides = (
        ("  both", divergence.before),
        ("- recorded only", divergence.only_real),
        ("+ simulated only", divergence.only_simulated),
    )
    for mark, events in sides:
        for event in events[:SHOWN_EVENTS]:
            yield f"   {mark:16} {_event(event)}"
        if len(events) > SHOWN_EVENTS:
            yield f"   {mark:16} ... {len(events) - SHOWN_EVENTS} more"


def _event(event: Event) -> str:
    return f"{event.action:5} {event.size_bytes:>16,} bytes  {event.place}"


def _group_lines(diff: TraceDiff) -> Iterator[str]:
    for title, groups in (("recorded", diff.only_real), ("simulated", diff.only_simulated)):
        if groups:
            total, count = sum(g.total_bytes for g in groups), sum(g.count for g in groups)
            yield f"only {title}: {count:,} allocations, {in_gib(total)} in all"
            yield from _largest(groups)


def _largest(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups[:SHOWN_GROUPS]:
        yield f"   {group.count:>6,} x {group.size_bytes:>16,} bytes  {group.phase:14}  {group.place}"
    if len(groups) > SHOWN_GROUPS:
        yield f"   ... {len(groups) - SHOWN_GROUPS} more"
