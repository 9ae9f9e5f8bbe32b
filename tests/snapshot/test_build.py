"""Snapshots are what torch's own memory-viz reads, and show the memory that was reported."""

import copy
import pickle
import pickletools
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from harness.errors import InputError
from harness.snapshot import (
    BEFORE_RECORDING,
    AllocationSpan,
    Label,
    TraceEvent,
    build_snapshot,
    categorize,
    find_peak,
    label_snapshot,
    phase_metadata,
    read_snapshot,
    recording_of,
    snapshot_of_storages,
    spans_from_trace,
    write_snapshot,
)
from harness.snapshot.shape import validate_snapshot
from tests.support.memory_viz import check_torch_reads

# Every `case` of unpickle() in pytorch's torch/utils/viz/MemoryViz.js; anything else makes the page throw.
PAGE_READS = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"),
    "LONG1",
    *("BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT"),
    *("DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
}
# What every entry has in torch/csrc/cuda/memory_snapshot.cpp (torch 2.13); `category` is the page's own.
SEGMENT_KEYS = {
    *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"),
    *("segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"),
}
BLOCK_KEYS = {"address", "size", "requested_size", "state", "frames"}
TRACE_KEYS = {"action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "frames"}
FRAMES = [{"filename": "/x/harness/step.py", "line": 58, "name": "train_step"}]


def page_timeline(snapshot: dict[str, Any]) -> list[int]:
    """Bytes after each alloc and free, replayed the way the page's process_alloc_data does."""
    trace = snapshot["device_traces"][0]
    live: dict[int, int] = {}
    changes = []
    there_before = 0
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            changes.append(entry["size"])
        elif entry["action"] == "free_completed":
            if live.pop(entry["addr"], None) is None:
                there_before += entry["size"]
            changes.append(-entry["size"])
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in live:
                there_before += block["requested_size"]
            address += block["size"]
    totals = [there_before]
    for change in changes:
        totals.append(totals[-1] + change)
    return totals


def segment(address: int, kind: str, blocks: list[tuple[int, int, str]]) -> dict[str, Any]:
    starts = [address + sum(size for size, *_ in blocks[:i]) for i in range(len(blocks))]
    return {
        "device": 0,
        "address": address,
        "total_size": sum(size for size, *_ in blocks),
        "allocated_size": sum(size for size, _, state in blocks if state == "active_allocated"),
        "active_size": sum(size for size, _, state in blocks if state != "inactive"),
        "requested_size": sum(requested for _, requested, _ in blocks),
        "stream": 0,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": FRAMES,
        "blocks": [
            {"address": start, "size": size, "requested_size": requested, "state": state, "frames": FRAMES}
            for start, (size, requested, state) in zip(starts, blocks, strict=True)
        ],
    }


def allocator_snapshot() -> dict[str, Any]:
    """Two segments by hand: a small allocation kept, a large one freed, one pending, an OOM."""
    forward, backward = phase_metadata("forward", 1), phase_metadata("backward", 1)
    address = 0x7F12_3400_0000
    events = [
        TraceEvent("segment_alloc", address, 2 << 20, forward, FRAMES, time_us=1),
        TraceEvent("alloc", address, 1000, forward, FRAMES, category="activations", time_us=2),
        TraceEvent("segment_alloc", address + (1 << 30), 20 << 20, backward, FRAMES, time_us=3),
        TraceEvent("alloc", address + (1 << 30), 5 << 20, backward, FRAMES, category="gradients", time_us=4),
        TraceEvent("alloc", address + (1 << 30) + (5 << 20), 3 << 20, backward, time_us=5),
        TraceEvent("free_requested", address + (1 << 30), 5 << 20, backward, time_us=6),
        TraceEvent("free_completed", address + (1 << 30), 5 << 20, backward, time_us=7),
        TraceEvent("free_requested", address + (1 << 30) + (5 << 20), 3 << 20, backward, time_us=8),
        TraceEvent("oom", 12345, 1 << 40, backward, time_us=9),
    ]
    segments = [
        segment(address, "small", [(1024, 1000, "active_allocated"), ((2 << 20) - 1024, 0, "inactive")]),
        segment(
            address + (1 << 30),
            "large",
            [(5 << 20, 0, "inactive"), (3 << 20, 3 << 20, "active_pending_free"), (12 << 20, 0, "inactive")],
        ),
    ]
    return build_snapshot(events, segments)


def storage_spans() -> list[AllocationSpan]:
    return [
        AllocationSpan(1, 4096, BEFORE_RECORDING, category="parameters"),
        AllocationSpan(2, 100, BEFORE_RECORDING, 3, death_phase="backward"),
        AllocationSpan(3, 30 << 20, 0, 2, "forward", "backward", frames=FRAMES),
        AllocationSpan(4, 0, 1, None, "forward"),
        AllocationSpan(4, 4096, 4, None, "backward", category="gradients", module="lm_head", frames=FRAMES),
    ]


SNAPSHOTS = {
    "allocator": allocator_snapshot,
    "storages": lambda: snapshot_of_storages(storage_spans()),
    "empty": lambda: snapshot_of_storages([]),
}


@pytest.fixture(params=SNAPSHOTS)
def snapshot(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SNAPSHOTS[request.param]()


def test_structure_is_torchs(snapshot: dict[str, Any]) -> None:
    assert {"segments", "device_traces", "allocator_settings", "external_annotations"} == set(snapshot)
    for segment in snapshot["segments"]:
        assert set(segment) == SEGMENT_KEYS
        assert all(set(block) - {"category"} == BLOCK_KEYS for block in segment["blocks"])
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        assert segment["allocated_size"] == _memory_viz.calc_active(segment)
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
    for entry in snapshot["device_traces"][0]:
        expected = TRACE_KEYS - {"addr"} | {"device_free"} if entry["action"] == "oom" else TRACE_KEYS
        assert expected <= set(entry) <= expected | {"category", "pool_id"}
    validate_snapshot(snapshot)


def test_accepted_by_torchs_memory_viz(snapshot: dict[str, Any]) -> None:
    before = copy.deepcopy(snapshot)
    active = sum(
        block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    check_torch_reads(snapshot)
    assert f"total_allocated: {_memory_viz.Bytes(active)}" in _memory_viz.segsum(snapshot)
    compared = _memory_viz.compare(snapshot["segments"], [], format_flamegraph=lambda lines: lines)
    assert compared.count("only_before") >= len(snapshot["segments"])
    assert _memory_viz.trace(snapshot).count("MEM[") == 0  # every allocation lies in a segment
    assert snapshot == before
    kept = _memory_viz.filter_alloc_free_pairs(copy.deepcopy(snapshot))["device_traces"][0]
    allocs = [entry["addr"] for entry in kept if entry["action"] == "alloc"]
    assert set(allocs) <= {b["address"] for s in snapshot["segments"] for b in s["blocks"]}


def test_the_file_stays_within_what_the_page_reads(snapshot: dict[str, Any], tmp_path: Path) -> None:
    # The same instructions in a real file: all kinds of numbers, long strings, many entries.
    event = TraceEvent("alloc", 2**47, 2**33, "ü" * 300, FRAMES, time_us=1_748_730_219_596_671)
    many = [TraceEvent("alloc", i << 9, 512, f"note {i}", FRAMES) for i in range(3000)]
    snapshot["device_traces"].append(build_snapshot([event, *many], [])["device_traces"][0])
    write_snapshot(tmp_path / "snapshot.pickle", snapshot)
    data = (tmp_path / "snapshot.pickle").read_bytes()
    operations = list(pickletools.genops(data))
    assert {opcode.name for opcode, *_ in operations} <= PAGE_READS
    assert operations[0][1] == 4
    # The page's numbers are doubles: every integer must be one exactly.
    assert all(abs(argument) <= 2**53 for opcode, argument, _ in operations if opcode.name == "LONG1")
    assert pickle.loads(data) == snapshot
    assert read_snapshot(tmp_path / "snapshot.pickle") == snapshot


@pytest.mark.parametrize("seed", range(10))
def test_memory_recomputed_from_the_trace_is_the_reported_peak(seed: int) -> None:
    rng = random.Random(seed)
    spans = [AllocationSpan(0, rng.randrange(1, 2**33), BEFORE_RECORDING) for _ in range(5)]
    for index in range(200):
        live = [span for span in spans if span.died is None]
        if live and rng.random() < 0.5:
            dying = rng.choice(live)
            dying.died, dying.death_phase = index, "backward"
        else:
            spans.append(AllocationSpan(0, rng.randrange(1, 2**33), index, birth_phase="forward"))
    snapshot = snapshot_of_storages(spans)
    assert max(page_timeline(snapshot)) == find_peak(spans).allocated_bytes
    _memory_viz.segsum(snapshot)
    # And read back as if a GPU had written it, the same attribution comes out.
    again = spans_from_trace(snapshot["device_traces"][0], segments=snapshot["segments"], round_to_bytes=1)
    assert find_peak(again).allocated_bytes == find_peak(spans).allocated_bytes
    assert sorted(s.size_bytes for s in again) == sorted(s.size_bytes for s in spans)


def test_storages_never_share_an_address() -> None:
    spans = storage_spans()
    snapshot = snapshot_of_storages(spans)
    made = [e for e in snapshot["device_traces"][0] if e["action"] == "segment_alloc"]
    freed = [e for e in snapshot["device_traces"][0] if e["action"] == "segment_free"]
    ranges = sorted(
        {(e["addr"], e["addr"] + e["size"]) for e in made + freed}
        | {(s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"]}
    )
    assert len(ranges) == 4  # the empty storage has none
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert ranges[-1][1] < 2**53


def test_recorded_snapshots_get_categories_and_the_phases_of_autograds_thread() -> None:
    recorded = allocator_snapshot()
    trace = recorded["device_traces"][0]
    for entry in trace:
        entry.pop("category", None)
    trace[4]["user_metadata"] = ""  # as torch leaves it on autograd's own thread
    spans = spans_from_trace(trace, segments=recorded["segments"])
    label_snapshot(recorded, spans)
    assert trace[4]["user_metadata"] == phase_metadata("backward", 1)
    assert [entry.get("category") for entry in trace if entry["action"] == "alloc"] == categorize(spans)
    assert categorize(spans) == ["activations", "temporaries", "temporaries"]
    assert trace[5]["category"] == "temporaries"  # its free, which names it where the alloc is missing
    assert "unknown" in {entry.get("category") for entry in trace}
    _memory_viz.trace(recorded)


def test_what_was_there_before_the_recording_keeps_its_category(tmp_path: Path) -> None:
    """As the parameters of a step that is recorded after others: no entry of the trace tells of them."""
    recorded = allocator_snapshot()
    address = 0x7F12_0000_0000
    blocks = [(1 << 20, 1 << 20, "active_allocated"), (1 << 20, 0, "inactive")]
    recorded["segments"].append(segment(address, "large", blocks))
    trace = recorded["device_traces"][0]
    label_snapshot(recorded, spans_from_trace(trace, [Label(address, "parameters")], recorded["segments"]))
    validate_snapshot(recorded)
    write_snapshot(tmp_path / "snapshot.pickle", recorded)
    recording = recording_of(read_snapshot(tmp_path / "snapshot.pickle"))
    (category,) = [
        category
        for span, category in zip(recording.spans, recording.categories or [], strict=True)
        if span.address == address
    ]
    assert category == "parameters"
    _memory_viz.trace(recorded)


def test_what_is_not_plain_data_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    with pytest.raises(TypeError, match="plain data only, found PosixPath"):
        write_snapshot(path, {"segments": [], "device_traces": [], "where": path})
    with pytest.raises(InputError, match="cannot write"):
        write_snapshot(tmp_path / "missing" / "snapshot.pickle", snapshot_of_storages([]))
    assert list(tmp_path.iterdir()) == []
