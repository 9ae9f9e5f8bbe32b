"""What torch's own viewer of memory makes of a snapshot."""

import base64
import json
import pickle
import re
from typing import Any

from torch.cuda import _memory_viz


def check_torch_reads(snapshot: dict[str, Any]) -> None:
    """Its totals, its pictures, every event, and the pages that plot it, with the snapshot inside."""
    trace = snapshot["device_traces"][0]
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in _memory_viz.segsum(snapshot)
    # A flame graph's line ends with its bytes: the segments' own picture holds every reserved byte.
    for picture in (_memory_viz.segments, _memory_viz.memory):
        drawn = picture(snapshot, format_flamegraph=lambda lines: lines)
        assert sum(int(line.rpartition(" ")[2]) for line in drawn.splitlines()) == reserved
    text, actions = _memory_viz.trace(snapshot), [entry["action"] for entry in trace]
    assert f"{len(trace)} entries" in text
    assert text.count("# free completed") == actions.count("free_completed")
    assert text.count("del ") == actions.count("free_requested")
    assert text.count("cudaMalloc(") == actions.count("segment_alloc")
    assert text.count("cudaFree(") == actions.count("segment_free")
    for plot in (
        _memory_viz.trace_plot(snapshot),
        _memory_viz.trace_plot(snapshot, plot_segments=True),
        _memory_viz.segment_plot(snapshot),
    ):
        found = re.search(r"const local_files = (\[.*\])", plot)
        assert found
        assert pickle.loads(base64.b64decode(json.loads(found[1])[0]["base64"])) == snapshot
