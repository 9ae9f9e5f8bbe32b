"""The memory history: what each byte was and when, memory-viz files in and out, differences of two."""
# pyright: reportUnusedImport=false

from harness.snapshot.as_json import snapshot_to_json
from harness.snapshot.attribution import (
    AS_LARGE,
    breakdown_at,
    breakdowns_at_peaks,
    by_kind_of_module,
    bytes_by_module,
    categorize,
    find_peak,
    module_of_its_kind,
    name_by_size,
    top_allocations,
)
from harness.snapshot.build import (
    TraceEvent,
    build_snapshot,
    label_blocks,
    label_snapshot,
    snapshot_of_storages,
    write_snapshot,
)
from harness.snapshot.held import Change, HeldDiff, diff_held, held_at
from harness.snapshot.leaks import FEWEST_ENDS, Growth, Leaks, find_leaks
from harness.snapshot.message import message_in_words, read_message, requested_in
from harness.snapshot.out_of_memory import OutOfMemory, oom_in_words, remedy
from harness.snapshot.recording import Recording, devices_in, recording_of
from harness.snapshot.safe_read import read_snapshot
from harness.snapshot.segments import Piece, Segment, free_stretches, pieces_in_use, segments_at, without
from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan, Frame
from harness.snapshot.stacks import NO_STACK, own_place, place, readable, stack_line, without_stack
from harness.snapshot.trace import Label, phase_metadata, phase_of, spans_from_trace, step_ends
