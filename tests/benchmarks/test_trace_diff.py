"""Trace diff: a simulation does not differ from itself, and planted differences are found, only those.
Sequences are aligned as by the textbook's longest common subsequence."""

import random
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trace_diff.alignment import align
from benchmarks.trace_diff.in_words import trace_diff_lines
from benchmarks.trace_diff.traces import Group, diff_traces
from harness.hardware.hardware import find_hardware
from harness.simulate.simulated_run import simulate
from harness.snapshot import read_snapshot, recording_of, write_snapshot
from harness.snapshot.stacks import NO_STACK, place_of
from tests.support.tiny import tiny

Trace = list[dict[str, Any]]
MODEL = {"filename": "/lib/site-packages/transformers/models/llama.py", "line": 7, "name": "Mlp.forward"}
ODD = 12_345_678
"""A size that the tiny model never asks for."""


@cache
def snapshot() -> dict[str, Any]:
    return simulate(tiny(gradient_accumulation_steps=2), find_hardware("h100"))[1].snapshot()


def trace() -> Trace:
    """A copy of the simulated trace, to be changed."""
    return [dict(entry) for entry in snapshot()["device_traces"][0]]


def entry(action: str, size: int, phase: str = "", frames: Any = (MODEL,), **more: Any) -> dict[str, Any]:
    metadata = f"phase={phase}" if phase else ""
    return {
        "action": action,
        "addr": 1,
        "size": size,
        "user_metadata": metadata,
        "frames": list(frames),
        **more,
    }


def where(changed: Trace, phase: str, action: str = "alloc", nth: int = 5) -> int:
    """Index of the nth entry of this kind."""
    found = [
        i for i, e in enumerate(changed) if e["action"] == action and e["user_metadata"] == f"phase={phase}"
    ]
    return found[nth]


def test_a_simulation_against_itself_has_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    write_snapshot(path, snapshot())
    read = read_snapshot(path)
    diff = diff_traces(recording_of(read).trace, trace())
    assert [p.phase for p in diff.phases] == [
        *("data", "forward", "backward", "forward", "backward", "optimizer_step"),
    ]
    assert diff.divergences == diff.only_real == diff.only_simulated == []
    assert all(p.aligned and p.matching == p.real_events > 0 for p in diff.phases)
    assert "no divergence: the same allocations and frees in the same order" in trace_diff_lines(diff)


def test_an_allocation_that_was_not_simulated_is_found_with_its_place() -> None:
    real = trace()
    at = where(real, "backward")
    real.insert(at, entry("alloc", ODD, "backward"))
    real.insert(at + 1, entry("free_requested", ODD, "backward"))
    diff = diff_traces(real, trace())
    (divergence,) = diff.divergences
    assert [e.token for e in divergence.only_real] == [("alloc", ODD), ("free", ODD)]
    assert divergence.only_simulated == []
    assert [e.entry for e in divergence.only_real] == [at, at + 1]
    assert not divergence.reordered
    assert diff.only_real == [Group("backward", "models/llama.py:7 forward", ODD, 1)]
    assert diff.only_simulated == []
    text = "\n".join(trace_diff_lines(diff))
    assert "1 divergences" in text
    assert "alloc       12,345,678 bytes  models/llama.py:7 forward" in text


def test_an_allocation_that_was_only_simulated_is_found() -> None:
    real = trace()
    at = where(real, "forward")
    gone = real.pop(at)
    diff = diff_traces(real, trace())
    (divergence,) = diff.divergences
    assert divergence.only_real == []
    assert [e.token for e in divergence.only_simulated] == [("alloc", gone["size"])]
    assert [(g.phase, g.size_bytes, g.count) for g in diff.only_simulated] == [("forward", gone["size"], 1)]


def test_another_size_is_one_divergence_with_both_sizes() -> None:
    real = trace()
    at = where(real, "optimizer_step", nth=0)
    before = real[at]["size"]
    real[at]["size"] = ODD
    (divergence,) = diff_traces(real, trace()).divergences
    assert [e.size_bytes for e in divergence.only_real] == [ODD]
    assert [e.size_bytes for e in divergence.only_simulated] == [before]


def test_another_order_is_told_from_another_allocation() -> None:
    simulated = [
        entry("alloc", 10, "forward"),
        entry("alloc", 20, "forward"),
        entry("free_requested", 10, "forward"),
        entry("free_requested", 20, "forward"),
    ]
    real = [*simulated[:2], simulated[3], simulated[2]]
    diff = diff_traces(real, simulated)
    assert len(diff.divergences) == 2  # 20 is freed before, and not after
    assert diff.only_real == diff.only_simulated == []
    moved = [entry("alloc", 30, "forward"), *simulated]
    late = [*simulated, entry("alloc", 30, "forward")]
    assert len(diff_traces(moved, late).divergences) == 2
    assert diff_traces(moved, late).only_real == []


def test_several_planted_differences_are_all_found_in_their_phases() -> None:
    real = trace()
    for phase, size in (("optimizer_step", 3 * ODD), ("backward", 2 * ODD), ("forward", ODD)):
        real.insert(where(real, phase), entry("alloc", size, phase))
    diff = diff_traces(real, trace())
    assert [(g.phase, g.size_bytes) for g in diff.only_real] == [
        ("optimizer_step", 3 * ODD),
        ("backward", 2 * ODD),
        ("forward", ODD),
    ]
    assert len(diff.divergences) == 3


def test_peaks_are_counted_from_the_beginning_of_the_step() -> None:
    steps = [
        entry("alloc", 100, "forward"),
        entry("free_requested", 60, "forward"),
        entry("alloc", 30, "backward"),
    ]
    forward, backward = diff_traces(steps, steps).phases
    assert (forward.real_peak_bytes, backward.real_peak_bytes) == (100, 100 - 60 + 30)


def test_the_last_whole_step_of_several_recorded_ones_is_compared() -> None:
    """As measure_cuda records: setup, then steps, each entry with its step's number."""

    def step(number: int, size: int) -> Trace:
        phases = ("data", "forward", "backward", "optimizer_step")
        return [entry("alloc", size, **{"user_metadata": f"step={number} phase={p}"}) for p in phases]

    simulated = [entry("alloc", 7, phase) for phase in ("data", "forward", "backward", "optimizer_step")]
    real = [entry("alloc", 999, "setup"), *step(3, 5), *step(4, 7)]
    assert diff_traces(real, simulated).divergences == []
    assert len(diff_traces([*step(3, 7), *step(4, 5)], simulated).divergences) == 4
    cut = [*step(3, 7), *step(4, 5)[:2]]  # ran out of memory in its forward
    assert diff_traces(cut, simulated).divergences == []


def test_a_recording_of_somebody_else_is_compared_whole() -> None:
    """No metadata, and C++ frames around the Python ones: what torch records by default."""
    cpp = {"filename": "??", "line": 0, "name": "c10::cuda::CUDACachingAllocator::malloc"}
    torch_frame = {"filename": "/lib/torch/nn/modules/linear.py", "line": 1, "name": "forward"}
    frames = [cpp, torch_frame, cpp, MODEL, cpp]
    real = [{"action": "alloc", "addr": 1, "size": size, "frames": frames} for size in (1, 2, 3)]
    diff = diff_traces(real, trace())
    (whole,) = diff.phases
    assert whole.phase == "whole trace"
    assert whole.real_events == 3
    assert {g.place for g in diff.only_real} <= {"models/llama.py:7 forward"}
    assert place_of([cpp]) == place_of([]) == NO_STACK
    assert place_of([cpp, torch_frame]) == "modules/linear.py:1 forward"


sequences = st.lists(st.integers(0, 3), max_size=14)


def longest_common_subsequence(one: list[int], other: list[int]) -> int:
    """Its length, by the textbook's table."""
    above = [0] * (len(other) + 1)
    for x in one:
        row = [0]
        for j, y in enumerate(other):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
        above = row
    return above[-1]


@given(sequences, sequences)
def test_matches_are_equal_in_order_and_as_many_as_can_be(one: list[int], other: list[int]) -> None:
    alignment = align(one, other)
    i = j = 0
    for start, other_start, length in alignment.matches:
        assert length > 0
        assert (start, other_start) != (i, j) or (i, j) == (0, 0)  # runs that touch are one run
        assert start >= i
        assert other_start >= j
        assert one[start : start + length] == other[other_start : other_start + length]
        i, j = start + length, other_start + length
    assert alignment.complete
    assert sum(match.length for match in alignment.matches) == longest_common_subsequence(one, other)


def test_too_many_differences_leave_the_common_beginning_and_end() -> None:
    one, other = [1, 2, *range(100, 150), 3], [1, 2, *range(200, 250), 3]
    alignment = align(one, other, max_differences=20)
    assert not alignment.complete
    assert alignment.matches == [(0, 0, 2), (52, 52, 1)]
    assert align(one, other, max_differences=100).complete


def test_a_hundred_thousand_events_of_repeating_layers_are_aligned() -> None:
    """A textbook's table of them would have ten thousand million places."""
    rng = random.Random(0)
    layer = [rng.randrange(30) for _ in range(600)]
    one = layer * 160
    other = list(one)
    for _ in range(500):
        other.pop(rng.randrange(len(other)))
    alignment = align(one, other)
    assert sum(match.length for match in alignment.matches) == len(other)
