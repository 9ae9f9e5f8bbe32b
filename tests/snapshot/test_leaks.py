"""What two snapshots hold, and what grows from step to step: every kind of change, by category and by stack;
the steps by three ways, and what is no leak."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.snapshot.held import Amount, Holder, diff_held, held_at
from harness.snapshot.leaks import MOST_ENDS, find_leaks
from harness.snapshot.recording import recording_of
from tests.snapshot.test_from_stacks import BACKWARD, FORWARD, LOAD, MOVE, STEP, entry

KEEP = (("/home/me/train.py", "keep"), *LOAD[1:])


def steps(count: int, *, keeps: bool) -> list[dict[str, Any]]:
    """A loop: a batch, an activation, a gradient; optimizer state in the first; 1,024 bytes kept of each."""
    trace = []
    for i in range(count):
        trace += [entry("alloc", 512, LOAD), entry("alloc", 1024, FORWARD), entry("alloc", 1536, BACKWARD)]
        trace += [entry("free_requested", 1024)]
        if i == 0:
            trace.append(entry("alloc", 2048, STEP))
        trace += [entry("alloc", 4096, STEP), entry("free_requested", 4096, STEP)]
        trace += [entry("free_requested", 1536, STEP), entry("free_requested", 512, LOAD)]
        if keeps:
            trace.append(entry("alloc", 2**20 + 1024 * i, KEEP, 1024))
    return [{**e, "time_us": 10**15 + i} for i, e in enumerate(trace)]


def snapshot(trace: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": [trace], **more}


def leaks(trace: list[dict[str, Any]], annotations: Any = None) -> Any:
    return find_leaks(recording_of(snapshot(trace)), annotations)


def test_what_every_step_keeps_is_found_with_its_stack() -> None:
    found = leaks(steps(5, keeps=True))
    assert found.steps_from == "the optimizer's steps in the stacks"
    assert len(found.ends) == 5
    (growth,) = found.growths
    assert growth.holder.place == "me/train.py:7 keep"
    assert growth.at_ends_bytes == [1024, 2048, 3072, 4096, 5120]
    assert (growth.total_bytes, growth.count) == (4096, 5)
    # the optimizer state, and the batch of the next step, which was moved before its forward begins
    assert found.allocated_bytes == [512 + 1024 * i + 512 * (i < 5) for i in range(1, 6)]


def test_optimizer_state_and_batches_are_no_leak() -> None:
    found = leaks(steps(5, keeps=False))
    assert found.can_tell
    assert found.growths == []


def test_annotations_of_the_steps_come_first() -> None:
    trace = steps(4, keeps=True)
    at = [e["time_us"] for e in trace if e["frames"] and e["frames"][0]["name"] == "keep"]
    marks = [
        {"stage": stage, "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": time}
        for time in at
        for stage in ("START", "END")
    ]
    found = leaks(
        trace, [*marks, {"stage": "END", "name": "Optimizer.zero_grad#AdamW.zero_grad", "time_us": at[0]}]
    )
    assert found.steps_from == "torch's annotations of the steps"
    assert [growth.holder.place for growth in found.growths] == ["me/train.py:7 keep"]
    # hostile or of another device: as if there were none
    for bad in (
        7,
        [7, {"stage": "END"}, {"stage": "END", "name": 1, "time_us": "x"}],
        [{**m, "device": 3} for m in marks],
    ):
        assert leaks(trace, bad).steps_from == "the optimizer's steps in the stacks"


def test_metadata_that_numbers_the_steps_comes_before_all() -> None:
    trace = steps(3, keeps=True)
    each = len(trace) // 3
    stated = [{**e, "user_metadata": f"step={min(2, i // each)} phase=forward"} for i, e in enumerate(trace)]
    assert leaks(stated).steps_from == "the metadata of its entries"


@pytest.mark.parametrize("count", [1, 2])
def test_two_steps_cannot_tell(count: int) -> None:
    found = leaks(steps(count, keeps=True))
    assert len(found.ends) == count
    assert not found.can_tell
    assert found.growths == []


def test_a_recording_without_steps_says_so() -> None:
    found = leaks([entry("alloc", 512 * i, LOAD) for i in range(9)])
    assert found.ends == []
    assert "neither metadata nor annotations nor an optimizer" in found.steps_from


def test_of_many_steps_some_are_looked_at() -> None:
    found = leaks(steps(3 * MOST_ENDS, keeps=True))
    assert len(found.ends) == 3 * MOST_ENDS
    (growth,) = found.growths
    assert len(growth.at_ends_bytes) == len(found.allocated_bytes) == MOST_ENDS
    assert growth.total_bytes == 1024 * (3 * MOST_ENDS - 1)


holders = st.builds(Holder, st.sampled_from("ab"), st.sampled_from([(), ("x",), ("y", "x")]), st.just("x"))
held = st.dictionaries(holders, st.builds(Amount, st.integers(1, 99), st.integers(1, 9)))


def of(trace: list[dict[str, Any]]) -> dict[Holder, Amount]:
    recording = recording_of({"segments": [], "device_traces": [trace]})
    return held_at(recording, recording.moment)


def test_new_gone_grown_and_shrunk() -> None:
    a = of([entry("alloc", 512, MOVE), entry("alloc", 1024, LOAD), entry("alloc", 1536, FORWARD, 4096)])
    b = of([entry("alloc", 512, MOVE, 1024), entry("alloc", 2048, FORWARD), entry("alloc", 4096, STEP)])
    diff = diff_held(a, b)
    kinds = {(change.holder.category, change.kind): change.bytes for change in diff.changes}
    assert kinds == {
        ("parameters", "grown"): 512,
        ("other", "gone"): -512,
        ("activations", "shrunk"): 512 - 4096,
        ("optimizer_state", "new"): 512,
    }
    assert [change.holder.place for change in diff.of_kind("shrunk")] == ["me/net.py:7 forward"]
    assert diff.changes[0].kind == "shrunk"  # the largest first
    assert diff.by_category()["optimizer_state"] == (0, 512)


@given(held, held)
def test_the_changes_add_up(before: dict[Holder, Amount], after: dict[Holder, Amount]) -> None:
    diff = diff_held(before, after)
    assert diff.before_bytes == sum(amount.total_bytes for amount in before.values())
    assert diff.after_bytes == sum(amount.total_bytes for amount in after.values())
    assert sum(change.bytes for change in diff.changes) == diff.after_bytes - diff.before_bytes
    sizes = diff.by_category().values()
    assert (sum(a for a, _ in sizes), sum(b for _, b in sizes)) == (diff.before_bytes, diff.after_bytes)
    assert {change.holder for change in diff.changes} == before.keys() | after.keys()
