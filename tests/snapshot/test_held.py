"""What two snapshots hold: every kind of change, by category and by stack; the totals add up."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.snapshot.held import Amount, Holder, diff_held, held_at
from harness.snapshot.recording import recording_of
from tests.snapshot.test_from_stacks import FORWARD, LOAD, MOVE, STEP, entry

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
