"""The memory history: what each byte was and when, memory-viz files in and out, differences of two."""

from harness.snapshot.as_json import snapshot_to_json
from harness.snapshot.attribution import breakdown_at, bytes_by_module, categorize, find_peak, top_allocations
from harness.snapshot.build import (
    TraceEvent,
    build_snapshot,
    label_snapshot,
    snapshot_of_storages,
    write_snapshot,
)
from harness.snapshot.diff.segments import Reserved, SegmentDiff, diff_segments
from harness.snapshot.diff.traces import Divergence, Event, Group, TraceDiff, diff_traces
from harness.snapshot.safe_read import read_snapshot
from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan, Frame
from harness.snapshot.stacks import NO_STACK, place_of, stack_line
from harness.snapshot.trace import (
    MIN_BLOCK_BYTES,
    Label,
    busiest_device,
    phase_metadata,
    spans_from_trace,
    step_ends,
)

__all__ = [
    "BEFORE_RECORDING",
    "MIN_BLOCK_BYTES",
    "NO_STACK",
    "AllocationSpan",
    "Divergence",
    "Event",
    "Frame",
    "Group",
    "Label",
    "Reserved",
    "SegmentDiff",
    "TraceDiff",
    "TraceEvent",
    "breakdown_at",
    "build_snapshot",
    "busiest_device",
    "bytes_by_module",
    "categorize",
    "diff_segments",
    "diff_traces",
    "find_peak",
    "label_snapshot",
    "phase_metadata",
    "place_of",
    "read_snapshot",
    "snapshot_of_storages",
    "snapshot_to_json",
    "spans_from_trace",
    "stack_line",
    "step_ends",
    "top_allocations",
    "write_snapshot",
]
