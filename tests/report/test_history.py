"""The numbers of a report: what a history says of a snapshot, held against the snapshot and the profile."""

import base64
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.allocator import Allocator, parse_settings, snapshot_segments
from harness.report import ReportRun, read_run
from harness.report.at_peak import by_code, by_module, kinds
from harness.report.columns import history_columns
from harness.report.figures import highest
from harness.report.groups import BEFORE
from harness.report.history import History, estimated_times_us, history_of
from harness.report.sections import segment_table
from harness.snapshot import pieces_in_use, read_snapshot, segments_at
from harness.step_profile.memory import CATEGORIES, MemoryBreakdown
from tests.support.reported import BASE, MIB, hand_made_snapshot, measured_run, simulated_run


@pytest.fixture(scope="module", params=[measured_run, simulated_run])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportRun, dict[str, Any]]:
    """A run folder as read, and its snapshot."""
    folder = request.param(tmp_path_factory.mktemp("run") / "it")
    return read_run(folder), read_snapshot(folder / "snapshot.pickle")


@pytest.fixture(scope="module")
def by_hand() -> History:
    history = history_of(hand_made_snapshot())
    assert history is not None
    return history


def test_every_moment_is_what_the_trace_says(run: tuple[ReportRun, dict[str, Any]]) -> None:
    """Backwards from the segments' own end: what was freed was there before, what was allocated was not."""
    read, snapshot = run
    history = read.history
    assert history is not None
    in_blocks = all(segment["address"] % 512 == 0 for segment in snapshot["segments"])
    allocated = sum(segment["allocated_size"] for segment in snapshot["segments"])
    expected = []
    for entry in reversed(snapshot["device_traces"][0]):
        size = -(-entry["size"] // 512) * 512 if in_blocks else entry["size"]
        if entry["action"] == "alloc":
            expected.append(allocated)
            allocated -= size
        elif entry["action"] == "free_requested":
            expected.append(allocated)
            allocated += size
    assert len(expected) > 200
    assert history.allocated_bytes().tolist() == expected[::-1]


def test_the_stack_adds_up_at_every_event(run: tuple[ReportRun, dict[str, Any]]) -> None:
    history = run[0].history
    assert history is not None
    assert (history.by_group().sum(axis=0) == history.allocated_bytes()).all()
    assert (history.by_group() >= 0).all()
    assert (history.reserved_bytes >= history.allocated_bytes()).all()


def test_the_peak_is_the_profile_s_by_every_category(run: tuple[ReportRun, dict[str, Any]]) -> None:
    read = run[0]
    assert read.history is not None
    assert read.profile is not None
    event, peak = read.history.peak()
    assert peak == read.profile.memory.peak_allocated_bytes
    at_peak = dict(zip(read.history.groups, read.history.by_group()[:, event].tolist(), strict=True))
    assert at_peak == {
        **{name: getattr(read.profile.memory.at_peak, f"{name}_bytes") for name in CATEGORIES},
        BEFORE: 0,
    }
    phase = next(r.phase for r in read.history.phases if r.start <= event < r.end)
    assert phase == read.profile.memory.peak_phase


def test_phases_follow_each_other_without_gaps(run: tuple[ReportRun, dict[str, Any]]) -> None:
    history = run[0].history
    assert history is not None
    assert history.phases[0].start == 0
    assert history.phases[-1].end == history.events
    assert [r.end for r in history.phases[:-1]] == [r.start for r in history.phases[1:]]
    names = [r.phase for r in history.phases]
    assert names[:4] == ["data", "forward", "backward", "optimizer_step"]


def test_a_history_by_hand(by_hand: History) -> None:
    megabytes = [5, 11, 13, 11, 11.5, 14.5, 8.5, 8, 5, 4]
    assert by_hand.allocated_bytes().tolist() == [int(size * MIB) for size in megabytes]
    assert by_hand.peak() == (5, int(14.5 * MIB))
    groups = dict(zip(by_hand.groups, by_hand.by_group()[:, 5] / MIB, strict=True))
    stated = {"inputs": 1, "activations": 6, "temporaries": 0.5, "gradients": 3, BEFORE: 4}
    assert groups == dict.fromkeys(CATEGORIES, 0) | stated
    # the small segment is there from its allocation to its free
    assert (by_hand.reserved_bytes / MIB).tolist() == [20, 20, 20, 20, 22, 22, 22, 20, 20, 20]
    assert [(r.phase, r.start, r.end) for r in by_hand.phases] == [
        ("data", 0, 1),
        ("forward", 1, 4),
        ("backward", 4, 8),
        ("optimizer_step", 8, 10),
    ]


def test_what_was_there_before_is_explained_by_the_profile() -> None:
    at_peak = MemoryBreakdown(
        parameters_bytes=3 * MIB,
        optimizer_state_bytes=MIB // 2,
        gradients_bytes=3 * MIB,
        activations_bytes=6 * MIB,
        temporaries_bytes=MIB // 2,
        inputs_bytes=MIB,
        other_bytes=MIB // 2 + 4096,  # with 4096 bytes that a trace does not show
    )
    history = history_of(hand_made_snapshot(), at_peak)
    assert history is not None
    baseline = dict(zip(history.groups, (history.baseline_bytes / MIB).tolist(), strict=True))
    assert {name: size for name, size in baseline.items() if size} == {
        "parameters": 3,
        "optimizer_state": 0.5,
        "other": 0.5,
    }
    assert history.peak()[1] == 14.5 * MIB


def test_a_profile_that_does_not_fit_explains_nothing() -> None:
    history = history_of(hand_made_snapshot(), MemoryBreakdown(activations_bytes=MIB, other_bytes=0))
    assert history is not None
    assert history.baseline_bytes[history.groups.index(BEFORE)] == 4 * MIB
    assert any("do not fit" in note for note in history.notes)


def test_without_phases_bytes_are_grouped_by_code() -> None:
    snapshot = hand_made_snapshot()
    for entry in snapshot["device_traces"][0]:
        entry["user_metadata"] = ""
        entry.pop("category", None)
    history = history_of(snapshot)
    assert history is not None
    assert not history.by_category
    sizes = dict(zip(history.groups, history.by_group()[:, 5] / MIB, strict=True))
    assert sizes["x/activations.py:7 train_step"] == 6
    assert sizes[BEFORE] == 4
    assert any("names no phases" in note for note in history.notes)


def test_segments_and_pieces_at_the_peak_by_hand(by_hand: History) -> None:
    used = pieces_in_use(by_hand.segments_then, by_hand.live_at(by_hand.peak()[0]))
    # 4 before, 1 + 6 + 3 after it without a gap: one stretch of 14 MiB; half of one in the small segment
    shown = [
        (
            (segment.address - BASE) / MIB,
            segment.kind,
            [(p.start_bytes / MIB, p.size_bytes / MIB) for p in pieces],
        )
        for segment, pieces in used
    ]
    assert shown == [(0, "large", [(0, 14)]), (64, "small", [(0, 0.5)])]
    table = segment_table(used)
    rows = {row[0].value: [cell.value for cell in row[1:]] for row in table.rows}
    assert rows["large"] == [1, 20 * MIB, 14 * MIB, 6 * MIB, 6 * MIB]
    assert rows["all"] == [2, 22 * MIB, int(14.5 * MIB), int(7.5 * MIB), 6 * MIB]


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_segments_at_a_moment_are_those_the_allocator_had(settings: str) -> None:
    """The model of the allocator remembers; the undone trace must agree."""
    chance = random.Random(3)
    trace: list[dict[str, Any]] = []

    def record(action: str, address: int, size: int, stream: int) -> None:
        trace.append({"action": action, "addr": address, "size": size})

    allocator = Allocator(parse_settings(settings), 2**32, on_event=record)
    live: list[Any] = []
    moments: list[tuple[int, list[tuple[int, int]]]] = []
    for i in range(300):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(allocator.malloc(int(2 ** chance.uniform(9, 27))))
        if i % 60 == 59:
            allocator.empty_cache()
        if i % 37 == 0:
            moments.append((len(trace) - 1, _extents(snapshot_segments(allocator))))
    final = snapshot_segments(allocator)
    assert len({str(extents) for _, extents in moments}) > 4
    for moment, extents in moments:
        found = segments_at(trace, final, moment)
        assert _joined((s.address, s.address + s.size_bytes) for s in found) == extents


def _extents(segments: Any) -> list[tuple[int, int]]:
    return _joined((s["address"], s["address"] + s["total_size"]) for s in segments)


def _joined(intervals: Any) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def test_kinds_and_boxes_hold_the_whole_peak(run: tuple[ReportRun, dict[str, Any]]) -> None:
    read = run[0]
    assert read.history is not None
    assert read.profile is not None
    found = kinds(read.history, read.profile)
    assert sum(kind.total_bytes for kind in found) == read.history.peak()[1]
    assert [kind.total_bytes for kind in found] == sorted((k.total_bytes for k in found), reverse=True)
    icicles = [by_code(read.history)]
    if read.profile.memory.at_peak_by_module:
        icicles.append(by_module(read.profile.memory.at_peak_by_module))
    for icicle in icicles:
        assert icicle.bytes[0] == read.history.peak()[1]
        for box, size in enumerate(icicle.bytes):
            inside = [b for b, parent in zip(icicle.bytes, icicle.parents, strict=True) if parent == box]
            assert sum(inside) <= size
            assert all(parent < box for box, parent in enumerate(icicle.parents))


def test_estimated_times_by_hand(by_hand: History) -> None:
    """data 1 event, forward 3, backward 4, optimizer_step 2."""
    assert [(run.phase, run.end - run.start) for run in by_hand.phases] == [
        ("data", 1),
        ("forward", 3),
        ("backward", 4),
        ("optimizer_step", 2),
    ]
    seconds = {"data": 1e-6, "forward": 9e-6, "backward": 40e-6, "optimizer_step": 4e-6}
    times = estimated_times_us(by_hand, seconds)
    assert times is not None
    assert times.tolist() == [0, 1, 4, 7, 10, 20, 30, 40, 50, 52]
    assert estimated_times_us(by_hand, seconds | {"backward": None}) is None


def test_boxes_by_module_by_hand() -> None:
    icicle = by_module(
        {"model.layers.0.mlp": 30, "model.layers.1.mlp": 20, "model.norm": 40, "(no module)": 10}
    )
    boxes = {
        label: (icicle.labels[parent] if parent >= 0 else None, size)
        for label, parent, size in zip(icicle.labels, icicle.parents, icicle.bytes, strict=True)
    }
    assert boxes == {
        "peak": (None, 100),
        "model": ("peak", 90),
        "(no module)": ("peak", 10),
        "layers.* × 2.mlp": ("model", 50),
        "norm": ("model", 40),
    }


def test_kinds_name_the_stack(by_hand: History) -> None:
    largest, second, *_ = kinds(by_hand, None)
    assert (largest.total_bytes, largest.group, largest.phase) == (6 * MIB, "activations", "forward")
    assert largest.stack == ["/x/activations.py:7 train_step", "/x/main.py:1 <module>"]
    assert (second.total_bytes, second.group, second.stack) == (4 * MIB, BEFORE, [])


def test_columns_hold_the_history(run: tuple[ReportRun, dict[str, Any]]) -> None:
    """Unpacked as the page does it."""
    history = run[0].history
    assert history is not None
    columns = history_columns(history)

    def unpacked(name: str) -> Any:
        column = columns[name]
        return np.frombuffer(zlib.decompress(base64.b64decode(column["data"])), column["type"])

    assert (unpacked("sizes")[unpacked("size")] == history.change_bytes).all()
    assert (unpacked("group") == history.group).all()
    node = int(unpacked("stack")[history.peak()[0]])
    lines = []
    while node:
        lines.append(columns["lines"][unpacked("node_line")[node]])
        node = int(unpacked("node_parent")[node])
    assert lines == history.tree.stack(int(history.stack[history.peak()[0]]))
    steps = np.searchsorted(unpacked("reserved_at"), np.arange(history.events), side="right") - 1
    assert (unpacked("reserved")[steps] == history.reserved_bytes).all()


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=400), st.integers(1, 50))
def test_downsampling_keeps_the_highest_of_every_stretch(values: list[int], count: int) -> None:
    array = np.array(values)
    picked = highest(array, count).tolist()
    assert len(picked) <= max(count, 1)
    assert picked == sorted(set(picked))
    assert max(values) == max(values[i] for i in picked)
    pixel = -(-len(values) // count)
    for i, value in enumerate(values):  # whoever looks there sees something at least as high
        assert any(values[j] >= value for j in picked if abs(i - j) <= pixel)


def test_a_snapshot_without_a_trace_is_what_was_held() -> None:
    """Its segments and blocks, at no event: record_memory_history() was not called, or with "state" alone."""
    snapshot = hand_made_snapshot()
    segments_only = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "segment_alloc"]
    for trace in ([], segments_only):
        snapshot["device_traces"] = [trace]
        history = history_of(snapshot)
        assert history is not None
        assert (history.events, history.when) == (0, "when the snapshot was taken")
        assert history.moment() == (-1, 4 * MIB)
        assert [span.size_bytes for span in history.live_at(-1)] == [4 * MIB]
        assert history.reserved_at_end_bytes == 20 * MIB
        assert [segment.size_bytes for segment in history.segments_then] == [20 * MIB]
    assert history_of({"segments": [], "device_traces": [[]]}) is None


def test_the_busiest_device_is_shown() -> None:
    snapshot = hand_made_snapshot()
    snapshot["device_traces"] = [snapshot["device_traces"][0][:2], [*snapshot["device_traces"][0]]]
    for segment in snapshot["segments"]:
        segment["device"] = 1
    history = history_of(snapshot)
    assert history is not None
    assert (history.device, history.peak()[1]) == (1, 14.5 * MIB)
    assert any("these devices: 0 (2 entries, 0 B reserved), 1 (13 entries" in n for n in history.notes)


def test_paths_of_users_are_shortened(tmp_path: Path) -> None:
    snapshot = hand_made_snapshot()
    for entry in snapshot["device_traces"][0]:
        for frame in entry["frames"]:
            frame["filename"] = (
                f"/home/ada/venv/lib/python3.11/site-packages/torch/{Path(frame['filename']).name}"
            )
    history = history_of(snapshot)
    assert history is not None
    assert all("ada" not in line for line in history.tree.lines)
