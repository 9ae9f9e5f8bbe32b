"""Reads one device of a snapshot: allocations, with the phases and categories that are stated or stacks show.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.snapshot.attribution import categorize, find_peak
from harness.snapshot.from_stacks import label_from_phases, phases_of_trace
from harness.snapshot.out_of_memory import OutOfMemory, out_of_memory
from harness.snapshot.spans import AllocationSpan
from harness.snapshot.trace import (
    MIN_BLOCK_BYTES,
    allocated_blocks,
    phase_of,
    spans_from_trace,
    stated_phases,
)
from harness.step_profile import CATEGORIES
from harness.units import in_gib


@dataclass(frozen=True)
class Device:
    """How much a snapshot has of one device."""

    index: int
    entries: int
    """The number of entries in its trace."""
    reserved_bytes: int
    """The bytes of its segments when the snapshot was taken."""
    ran_out: bool
    """Whether its trace has an out-of-memory."""

    def __str__(self) -> str:
        ran_out = ", ran out of memory" if self.ran_out else ""
        return f"{self.index} ({self.entries:,} entries, {in_gib(self.reserved_bytes)} reserved{ran_out})"


def devices_in(snapshot: Mapping[str, Any]) -> list[Device]:
    """The devices with a trace or a segment, by index."""
    traces = snapshot["device_traces"]
    reserved: dict[int, int] = {}
    for segment in snapshot["segments"]:
        index = segment.get("device", 0)
        reserved[index] = reserved.get(index, 0) + segment["total_size"]
    found = {index for index, trace in enumerate(traces) if trace} | reserved.keys()
    return [
        Device(
            index,
            len(trace := traces[index] if 0 <= index < len(traces) else []),
            reserved.get(index, 0),
            any(entry["action"] == "oom" for entry in trace),
        )
        for index in sorted(found)
    ]


def chosen_device(snapshot: Mapping[str, Any], index: int | None = None) -> int:
    """The device `index`; for None one that ran out of memory, else the one with the most trace entries, then
    the most reserved bytes; 0 where there is none.

    Raises InputError, naming the devices there are, for one that is not in the snapshot.
    """
    devices = devices_in(snapshot)
    if index is not None and index not in [device.index for device in devices]:
        listed = ", ".join(map(str, devices)) or "none"
        raise InputError(f"the snapshot tells nothing of device {index}. It has these devices: {listed}.")
    if index is not None:
        return index
    best = max(devices, key=lambda d: (d.ran_out, d.entries, d.reserved_bytes, -d.index), default=None)
    return 0 if best is None else best.index


def trace_of(snapshot: Mapping[str, Any], device: int) -> list[dict[str, Any]]:
    """The trace of a device; empty where it has none."""
    traces = snapshot["device_traces"]
    return traces[device] if 0 <= device < len(traces) else []


def segments_of(snapshot: Mapping[str, Any], device: int) -> list[dict[str, Any]]:
    """The segments of a device; a segment that states no device, as in old snapshots, is device 0's."""
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]


_CATEGORY_OF_PROFILER = {
    "parameter": "parameters",
    "gradient": "gradients",
    "activation": "activations",
    "temporary": "temporaries",
    "input": "inputs",
    "optimizer_state": "optimizer_state",
    "autograd_detail": "other",
    "unknown": "other",
}
"""Our category by torch.profiler's (profiler/_memory_profiler.py), which _memory_viz.profile_plot writes."""


@dataclass(frozen=True)
class Recording:
    """What one device allocated and freed. `born` and `died` of the spans index the trace."""

    device: int
    trace: Sequence[Mapping[str, Any]]
    segments: Sequence[Mapping[str, Any]]
    """The device's segments after the last entry of the trace."""
    spans: list[AllocationSpan]
    categories: list[str | None] | None
    """The category of every span, None for one that is not known, as for most memory from before the
    recording; None instead of the list where no category is known at all."""
    phases: Sequence[str | None]
    """The phase of every entry of the trace; None where it is not known."""
    from_stacks: bool
    """Whether phases and categories were read from the stacks, since the snapshot states none."""
    oom: OutOfMemory | None

    @property
    def moment(self) -> int:
        """The entry after which to look at what is held: the last out-of-memory, or else the last entry."""
        return len(self.trace) - 1 if self.oom is None else self.oom.index

    @property
    def peak(self) -> int:
        """The entry that reached the most allocated bytes; -1 where that was before the first entry."""
        return find_peak(self.spans).index


def recording_of(snapshot: Mapping[str, Any], device: int | None = None) -> Recording:
    """The recording of `device`, or of the one that `chosen_device` chooses, in a snapshot of checked shape.

    Raises InputError for a device that is not in the snapshot.
    """
    device = chosen_device(snapshot, device)
    trace, segments = trace_of(snapshot, device), segments_of(snapshot, device)
    stated = [phase_of(metadata) for metadata in stated_phases(trace)]
    read = None if any(stated) else phases_of_trace(trace)
    phases = stated if read is None else read
    round_to = MIN_BLOCK_BYTES if _in_blocks(trace, segments) else 1
    spans = spans_from_trace(trace, segments=segments, round_to_bytes=round_to, phases=phases)
    held = dict(allocated_blocks(segments))
    labels = [_label(trace, held, span) for span in spans]
    from_stacks = not any(stated) and not any(labels)
    if from_stacks:
        label_from_phases(spans, phases, [i for i, entry in enumerate(trace) if entry["action"] == "oom"])
    return Recording(
        device=device,
        trace=trace,
        segments=segments,
        spans=spans,
        categories=(categories := _categories(spans, labels)),
        phases=phases,
        from_stacks=from_stacks and categories is not None,
        oom=out_of_memory(trace, spans, segments, snapshot.get("allocator_settings") or {}),
    )


def _in_blocks(trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the addresses are those of an allocator's blocks; storages lie anywhere."""
    addresses = [segment["address"] for segment in segments]
    addresses += [entry["addr"] for entry in trace if entry["action"] == "alloc"]
    return not any(address % MIN_BLOCK_BYTES for address in addresses)


def _label(
    trace: Sequence[Mapping[str, Any]], held: Mapping[int, Mapping[str, Any]], span: AllocationSpan
) -> str | None:
    """The category that the snapshot itself states: the memory-viz page's `category`, which harness and
    profile_plot write. Sets the span's module too, which only harness writes. Where the span has no entry in
    the trace, the block in `held` at its address states both.
    """
    index = span.died if span.born < 0 else span.born
    entry = held[span.address] if index is None else trace[index]
    if isinstance(module := entry.get("module"), str):
        span.module = module
    category = entry.get("category")
    return category if category in CATEGORIES else _CATEGORY_OF_PROFILER.get(category or "")


def _categories(spans: Sequence[AllocationSpan], labels: Sequence[str | None]) -> list[str | None] | None:
    if any(labels):
        return [label or (None if s.born < 0 else "other") for label, s in zip(labels, spans, strict=True)]
    if not any(span.birth_phase or span.category for span in spans):
        return None
    found = zip(categorize(spans), spans, strict=True)
    return [span.category or (None if span.born < 0 else category) for category, span in found]
