"""Memory-viz snapshots: what torch.cuda.memory._snapshot() returns, built from events, and its file.

The structure is that of torch/csrc/cuda/memory_snapshot.cpp (torch 2.11 to 2.13); what reads it is
torch.cuda._memory_viz and the memory_viz page (torch/utils/viz/MemoryViz.js). The page colours
allocations by a `category` in the trace, and needs one called "unknown" once there is any.
This module imports no torch.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.snapshot.attribution import categorize
from harness.snapshot.recording import segments_of
from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan, Frame
from harness.snapshot.trace import allocated_blocks, phase_metadata, stated_phases
from harness.system import write_whole

PICKLE_PROTOCOL = 4
"""The memory_viz page reads protocols 2 to 4; Python 3.14 would write 5."""
FIRST_SYNTHETIC_ADDRESS = 0x7F00_0000_0000
"""Looks like a device address, and leaves room below 2**53, where the page's numbers stop being exact."""
DEFAULT_POOL = (0, 0)

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
]


@dataclass(slots=True)
class TraceEvent:
    """One action of the allocator."""

    action: Action
    address: int
    """In an "oom" event the device's free bytes instead."""
    size_bytes: int
    """For an allocation the bytes that were requested, before rounding."""
    metadata: str = ""
    """Text of `phase_metadata`, which the page shows beside the stack."""
    frames: Sequence[Frame] = ()
    category: str | None = None
    time_us: int = 0
    stream: int = 0
    module: str | None = None
    """Path of the module that it belongs to, where that is known."""


def build_snapshot(events: Iterable[TraceEvent], segments: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The snapshot of one device, index 0: its events in order, and its segments after the last one.

    `segments` are as torch gives them (allocator/memory_stats.py makes such).
    """
    shown = list(segments)
    trace = [_trace_entry(event) for event in events]
    active = sum(segment["active_size"] for segment in shown)
    trace.append(_end_of_trace(trace[-1]["time_us"] if trace else 0, active))
    return {
        "segments": shown,
        "device_traces": [trace],
        "allocator_settings": _default_allocator_settings(),
        "external_annotations": [],
    }


def snapshot_of_storages(spans: Sequence[AllocationSpan], times_us: Sequence[int] = ()) -> dict[str, Any]:
    """A snapshot of memory that has no allocator behind it (live CPU tensors): allocated = reserved.

    Every storage is a segment of its own, at an address used once; empty storages are left out.
    `times_us` are those of the events; without them the times are the events' indices.
    """
    events: list[tuple[int, TraceEvent]] = []
    segments: list[dict[str, Any]] = []
    address = FIRST_SYNTHETIC_ADDRESS
    for span, category in zip(spans, categorize(spans), strict=True):
        if span.size_bytes == 0:
            continue
        events.extend(_storage_events(span, address, category, times_us))
        if span.died is None:
            segments.append(_full_segment(address, span.size_bytes, _list(span.frames), category))
        address += span.size_bytes
    events.sort(key=lambda indexed: indexed[0])
    return build_snapshot([event for _, event in events], segments)


def label_snapshot(snapshot: dict[str, Any], spans: Sequence[AllocationSpan], device: int = 0) -> None:
    """Write categories, modules and missing phases into a recorded snapshot, in place: into its trace, and
    into the blocks that its segments hold, of which most were there before the trace began.

    `spans` are those of `spans_from_trace` on the same trace: their indices point into it.
    """
    trace = snapshot["device_traces"][device]
    for entry, stated in zip(trace, stated_phases(trace), strict=True):
        entry["user_metadata"] = stated
    for span, category in zip(spans, categorize(spans), strict=True):
        for index in (span.born, span.died):
            if index is not None and index != BEFORE_RECORDING:
                trace[index] |= _labels(span, category)
    label_blocks(segments_of(snapshot, device), spans)
    if trace:
        trace.append(_end_of_trace(trace[-1].get("time_us", 0), 0))


def label_blocks(segments: Iterable[Mapping[str, Any]], spans: Sequence[AllocationSpan]) -> None:
    """Write the category and the module of what lives to the end into the blocks of these segments."""
    held = {
        span.address: _labels(span, category)
        for span, category in zip(spans, categorize(spans), strict=True)
        if span.died is None
    }
    for address, block in allocated_blocks(segments):
        block |= held.get(address, {})


def _labels(span: AllocationSpan, category: str) -> dict[str, str]:
    return {"category": category, "module": span.module} if span.module else {"category": category}


def write_snapshot(path: Path, snapshot: Mapping[str, Any]) -> None:
    """Pickle a snapshot whole or not at all, in what the memory_viz page can read.

    Raises InputError when the path cannot be written, and TypeError when the snapshot holds an object that
    is no plain data (a numpy or torch scalar, for example).
    """
    buffer = io.BytesIO()
    _PlainPickler(buffer, PICKLE_PROTOCOL).dump(snapshot)
    write_whole(path, buffer.getvalue())


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:  # called for everything that is not plain data
        raise TypeError(f"a snapshot holds plain data only, found {type(obj).__qualname__}: {obj!r:.80}")


def _storage_events(
    span: AllocationSpan, address: int, category: str, times_us: Sequence[int]
) -> Iterator[tuple[int, TraceEvent]]:
    ends: tuple[tuple[int | None, str | None, tuple[Action, ...]], ...] = (
        (span.born, span.birth_phase, ("segment_alloc", "alloc")),
        (span.died, span.death_phase, ("free_requested", "free_completed", "segment_free")),
    )
    for index, phase, actions in ends:
        if index is None or index == BEFORE_RECORDING:
            continue
        metadata = phase_metadata(phase) if phase else ""
        time_us = times_us[index] if times_us else index
        for action in actions:
            yield (
                index,
                TraceEvent(
                    action, address, span.size_bytes, metadata, span.frames, category, time_us=time_us
                ),
            )


def _end_of_trace(time_us: int, active_bytes: int) -> dict[str, Any]:
    # torch writes this entry when a snapshot is taken while recording. Here it also carries the category
    # "unknown": where no entry has it, the page tries to add it and fails on a misspelt name.
    return _trace_entry(TraceEvent("snapshot", 0, active_bytes, category="unknown", time_us=time_us))


def _trace_entry(event: TraceEvent) -> dict[str, Any]:
    entry = {
        "action": event.action,
        "device_free" if event.action == "oom" else "addr": event.address,
        "size": event.size_bytes,
        "stream": event.stream,
        "time_us": event.time_us,
        "compile_context": "N/A",
        "user_metadata": event.metadata,
        "pool_id": DEFAULT_POOL,
        "frames": _list(event.frames),
    }
    if event.category is not None:
        entry["category"] = event.category
    if event.module:
        entry["module"] = event.module
    return entry


def _full_segment(address: int, size_bytes: int, frames: list[Frame], category: str) -> dict[str, Any]:
    block = {
        "address": address,
        "size": size_bytes,
        "requested_size": size_bytes,
        "state": "active_allocated",
        "frames": frames,
        "category": category,
    }
    return {
        "device": 0,
        "address": address,
        "total_size": size_bytes,
        "allocated_size": size_bytes,
        "active_size": size_bytes,
        "requested_size": size_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": DEFAULT_POOL,
        "is_expandable": False,
        "frames": frames,
        "blocks": [block],
    }


def _list(frames: Sequence[Frame]) -> list[Frame]:
    # Not a copy: pickle stores a list that many entries share once.
    return frames if isinstance(frames, list) else list(frames)


def _default_allocator_settings() -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
    }
