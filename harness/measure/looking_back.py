"""Asks an observer, once the recorded steps are over, what the memory was: of any loop that it observed."""

from dataclasses import dataclass

from harness.measure.observer import DeviceObserver, History
from harness.snapshot import breakdown_at, breakdowns_at_peaks, find_peak, top_allocations
from harness.step_profile import (
    MOST_STEPS,
    PHASES_BETWEEN_STEPS,
    Allocation,
    MemoryBreakdown,
    MemoryStats,
    StepPeak,
)


@dataclass
class LookBack:
    """The memory of the recorded steps."""

    memory: MemoryStats
    top: list[Allocation]
    """The largest allocations at the peak."""
    filled: list[Allocation]
    """The largest allocations when memory ran out, if it did."""
    held: MemoryBreakdown
    """The bytes by category at that moment."""
    history: History


def look_back(observer: DeviceObserver, *, ran_out: bool) -> LookBack:
    """What the memory was; to be asked before later steps and frees change the answer. `ran_out`: memory ran
    out just now."""
    memory = observer.memory()
    history = observer.history()
    phases = {
        name: stats
        for name, stats in observer.phase_memory().items()
        if name not in PHASES_BETWEEN_STEPS  # which have peaks of their own
    }
    if history.highest[0]:
        memory.peak_allocated_bytes, memory.peak_phase = history.highest[0], history.highest[1] or None
    elif phases:
        memory.peak_phase = max(phases, key=lambda name: phases[name].peak_allocated_bytes or 0)
        memory.peak_allocated_bytes = phases[memory.peak_phase].peak_allocated_bytes
    spans = history.spans
    if not spans or not (phases or ran_out):  # ended before a step was recorded: its peak is not known
        return LookBack(memory, [], [], MemoryBreakdown(), history)
    peak = find_peak(spans, leave_out=PHASES_BETWEEN_STEPS)
    memory.at_peak = breakdown_at(spans, peak.index)
    if memory.peak_allocated_bytes is None:
        memory.peak_allocated_bytes, memory.peak_phase = peak.allocated_bytes, peak.phase
    if memory.kind == "cuda_allocator" and memory.at_peak.other_bytes is not None:
        # The trace has requested sizes; what the allocator did not split off is known only in total.
        memory.at_peak.other_bytes += max(0, memory.peak_allocated_bytes - peak.allocated_bytes)
    recorded = list(zip(history.steps, history.step_ends, strict=False))[:MOST_STEPS]
    found = breakdowns_at_peaks(spans, [end for _, end in recorded], leave_out=PHASES_BETWEEN_STEPS)
    memory.at_peak_by_step = [
        StepPeak(step=step, at_peak=at_peak) for (step, _), at_peak in zip(recorded, found, strict=True)
    ]
    at_shortage = peak.index if history.ran_out is None else history.ran_out
    filled = top_allocations(spans, at_shortage) if ran_out else []
    held = breakdown_at(spans, at_shortage) if ran_out else MemoryBreakdown()
    return LookBack(memory, top_allocations(spans, peak.index), filled, held, history)
