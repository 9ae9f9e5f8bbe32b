"""Attribution against a slow, independent reading of the same events, and against hand-worked steps."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.snapshot.attribution import (
    Peak,
    breakdown_at,
    breakdowns_at_peaks,
    categorize,
    find_peak,
    name_by_size,
    top_allocations,
)
from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan
from harness.step_profile.memory import CATEGORIES

PHASES = ("setup", "data", "forward", "backward", "optimizer_step")
LABELS = ("parameters", "gradients", "optimizer_state", "inputs")


@dataclass
class Event:
    """The test's own record of what happened, read by the slow oracles below."""

    storage: int
    size: int
    phase: str | None


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[AllocationSpan], list[Event], dict[int, int]]:
    """Random births and deaths: (spans, events with negative sizes for frees, storages there before)."""
    spans, events = [], []
    before = {}
    for _ in range(draw(st.integers(0, 3))):
        label = draw(st.sampled_from((None, *LABELS)))
        before[len(spans)] = draw(st.integers(1, 1000))
        spans.append(AllocationSpan(len(spans), before[len(spans)], BEFORE_RECORDING, category=label))
    live = list(before)
    for index in range(draw(st.integers(0, 30))):
        phase = draw(st.sampled_from(PHASES))
        if live and draw(st.booleans()):
            storage = live.pop(draw(st.integers(0, len(live) - 1)))
            spans[storage].died, spans[storage].death_phase = index, phase
            events.append(Event(storage, -spans[storage].size_bytes, phase))
        else:
            size = draw(st.integers(1, 1000))
            label = draw(st.sampled_from((None, None, None, *LABELS)))
            live.append(len(spans))
            events.append(Event(len(spans), size, phase))
            spans.append(AllocationSpan(len(spans), size, index, birth_phase=phase, category=label))
    return spans, events, before


def slow_totals(events: list[Event], before: dict[int, int]) -> list[int]:
    """Bytes live before the first event and after each, by keeping the set of live storages."""
    live = dict(before)
    totals = [sum(live.values())]
    for event in events:
        if event.size > 0:
            live[event.storage] = event.size
        else:
            del live[event.storage]
        totals.append(sum(live.values()))
    return totals


@settings(max_examples=80)
@given(recordings())
def test_breakdown_adds_up_to_the_peak(recording) -> None:
    spans, events, before = recording
    totals = slow_totals(events, before)
    peak = find_peak(spans)
    assert peak.allocated_bytes == max(totals)
    assert totals[peak.index + 1] == max(totals) not in totals[: peak.index + 1]
    assert peak.phase == (events[peak.index].phase if peak.index >= 0 else None)
    breakdown = breakdown_at(spans, peak.index)
    assert breakdown.total_bytes() == peak.allocated_bytes
    assert sum(a.size_bytes for a in top_allocations(spans, peak.index, n=1000)) == max(totals)


@settings(max_examples=80)
@given(recordings(), st.sets(st.integers(0, 29)))
def test_each_step_has_its_own_peak(recording, cuts: set[int]) -> None:
    spans, events, before = recording
    totals = slow_totals(events, before)
    ends = sorted(end for end in cuts if end < len(events))
    late = [*ends[:-1], ends[-1] + 5] if ends and ends[-1] == len(events) - 1 else ends
    starts = [-1, *ends]
    expected = [
        breakdown_at(spans, max(range(start, end + 1), key=lambda index: totals[index + 1]))
        for start, end in zip(starts, ends, strict=False)
    ]
    assert breakdowns_at_peaks(spans, late) == expected  # what follows the last is no allocation


@settings(max_examples=80)
@given(recordings())
def test_every_moment_agrees_with_the_slow_sum(recording) -> None:
    spans, events, before = recording
    totals = slow_totals(events, before)
    for index in range(-1, len(events)):
        assert breakdown_at(spans, index).total_bytes() == totals[index + 1]


@settings(max_examples=80)
@given(recordings())
def test_activations_are_what_the_next_backward_finds_alive(recording) -> None:
    spans, events, _ = recording
    for span, category in zip(spans, categorize(spans), strict=True):
        assert category in CATEGORIES
        if span.category is not None:
            assert category == span.category
        elif span.born >= 0 and span.birth_phase == "forward":
            # Walk on from the birth: which comes first, the death or a backward?
            end = next(
                (
                    "backward" if event.phase == "backward" else "death"
                    for event in events[span.born + 1 :]
                    if event.phase == "backward" or (event.storage == span.address and event.size < 0)
                ),
                "backward",
            )
            assert category == ("activations" if end == "backward" else "temporaries")


def span(size: int, born: int, birth: str, died: int | None = None, death: str | None = None, **more):
    return AllocationSpan(born, size, born, died, birth, death, **more)


def test_two_micro_batches_by_hand() -> None:
    # event:  0 fwd  1 fwd  2 fwd | 3 bwd  4 bwd  5 bwd | 6 fwd  7 fwd | 8 bwd 9 bwd | 10 opt 11 opt 12 opt
    spans = [
        AllocationSpan(1, 100, BEFORE_RECORDING, category="parameters"),
        AllocationSpan(2, 7, BEFORE_RECORDING),  # a workspace nobody labelled
        span(30, 0, "forward", 5, "backward"),  # saved for the first backward
        span(5, 1, "forward", 2, "forward"),  # dead before it
        span(20, 3, "backward", 12, "optimizer_step", category="gradients"),  # accumulates over both
        span(4, 4, "backward"),  # nobody's, made in backward and kept
        span(30, 6, "forward", 9, "backward"),  # saved for the second backward
        span(2, 7, "forward", 12, "optimizer_step"),  # the loss: alive through its backward
        span(50, 8, "backward", 9, "backward"),
        span(60, 10, "optimizer_step", 11, "optimizer_step"),
        span(8, 10, "optimizer_step", category="optimizer_state"),
    ]
    assert categorize(spans) == [
        "parameters",
        "other",
        "activations",
        "temporaries",
        "gradients",
        "temporaries",
        "activations",
        "activations",
        "temporaries",
        "temporaries",
        "optimizer_state",
    ]
    # Largest at event 8: 100 + 7 + 20 + 4 + 30 + 2 + 50 = 213 (at event 10: 100+7+20+4+2+60+8 = 201).
    peak = find_peak(spans)
    assert peak == Peak(8, 213, "backward")
    assert breakdown_at(spans, peak.index).model_dump() == {
        "parameters_bytes": 100,
        "gradients_bytes": 20,
        "optimizer_state_bytes": 0,
        "activations_bytes": 32,
        "temporaries_bytes": 54,
        "inputs_bytes": 0,
        "other_bytes": 7,
        "gathered_parameters_bytes": 0,
    }


@pytest.mark.parametrize(
    ("phase", "category"),
    [("setup", "other"), (None, "other"), ("data", "inputs"), ("backward", "temporaries")],
)
def test_unlabelled_memory_by_the_phase_that_made_it(phase: str | None, category: str) -> None:
    assert categorize([AllocationSpan(1, 5, 0, birth_phase=phase)]) == [category]


def test_top_allocations_carry_what_a_person_needs() -> None:
    stack = [
        {
            "filename": "/home/me/env/lib/python3.11/site-packages/torch/nn/linear.py",
            "line": 134,
            "name": "forward",
        },
        {"filename": "/home/me/src/harness/training/step.py", "line": 60, "name": "train_step"},
        {"filename": "/usr/lib/python3.12/runpy.py", "line": 88, "name": "run"},
        {"filename": "train.py", "line": 1, "name": "<module>"},
    ]
    spans = [
        span(10, 0, "forward", module="model.layers.0.mlp", frames=stack),
        span(30, 1, "forward", 2, "forward"),  # dead by then
        span(20, 3, "backward", category="gradients"),
        span(10, 4, "backward"),
    ]
    top = top_allocations(spans, index=4, n=2)
    assert [(a.size_bytes, a.category, a.phase, a.module) for a in top] == [
        (20, "gradients", "backward", None),
        (10, "activations", "forward", "model.layers.0.mlp"),
    ]
    assert top[1].stack == [
        "torch/nn/linear.py:134 forward",
        "harness/training/step.py:60 train_step",
        "runpy.py:88 run",
        "train.py:1 <module>",
    ]


def test_what_a_backward_made_without_a_stack_has_the_place_of_what_is_as_large() -> None:
    """Cross entropy in fp32: the copy of the logits, its log-softmax, and in backward a gradient of each."""
    MiB = 2**20
    copy, softmax, layer, engine = (
        [{"filename": f"/lib/{file}.py", "line": 7, "name": "forward"}]
        for file in ("model/llama", "loss/entropy", "model/mlp", "torch/autograd/graph")
    )
    spans = [
        AllocationSpan(1, 64 * MiB, 0, birth_phase="forward", frames=copy),
        AllocationSpan(2, 64 * MiB, 1, birth_phase="forward", frames=softmax),
        AllocationSpan(3, 8 * MiB, 2, birth_phase="forward", frames=layer),
        AllocationSpan(4, 64 * MiB, 3, birth_phase="backward"),
        AllocationSpan(5, 8 * MiB, 4, birth_phase="backward", category="gradients"),
        AllocationSpan(6, 9 * MiB, 5, birth_phase="backward"),
        AllocationSpan(7, 64 * MiB, 6, birth_phase="optimizer_step"),
        AllocationSpan(8, 64 * MiB, 7, birth_phase="backward", module="lm_head"),
        AllocationSpan(9, 64 * MiB, 8, birth_phase="backward", frames=engine),
        AllocationSpan(10, 64 * MiB, 9, birth_phase="backward", frames=layer),
    ]
    name_by_size(spans)
    like = "(as large as what loss/entropy.py:7 forward made)"
    assert {span.address: span.module for span in spans if span.module} == {4: like, 8: "lm_head", 9: like}
