"""`harness snapshot show, diff, leaks` and `report --device`: what they print, what they refuse."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.test_leaks import snapshot, steps
from tests.snapshot.test_versions import written_by
from tests.support.commands import Call


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("COLUMNS", "120")
    return call


def write(name: str, content: dict[str, Any]) -> str:
    Path(name).write_bytes(pickle.dumps(content))
    return name


def test_show_begins_with_the_out_of_memory(call: Call) -> None:
    status, out, _ = call("snapshot", "show", write("oom.pickle", written_by("2.13")))
    assert status == 0
    assert out.startswith("Memory ran out: 3.0 MiB were asked for, and the device had 1.0 MiB left.\n")
    assert "torch/nn/modules/linear.py:7 forward" in out
    assert "optimizer_state" in out
    assert "Phases and categories are read from the stacks" in " ".join(out.split())


@pytest.mark.parametrize("command", [("snapshot", "show"), ("snapshot", "leaks"), ("report",)])
def test_a_device_that_is_not_there_is_refused_by_those_there_are(
    call: Call, command: tuple[str, ...]
) -> None:
    status, _, err = call(*command, write("a.pickle", written_by("2.13")), "--device", 3)
    assert status == 2
    assert "nothing of device 3" in err
    assert "0 (17 entries, 2.0 MiB reserved, ran out of memory)" in " ".join(err.split())


def test_diff_says_what_is_new_gone_and_grown(call: Call) -> None:
    a, b = (
        write("a.pickle", snapshot(steps(2, keeps=False))),
        write("b.pickle", snapshot(steps(4, keeps=True))),
    )
    status, out, _ = call("snapshot", "diff", a, b)
    assert status == 0
    assert "0.5 KiB held in a.pickle when it was taken" in out
    assert "4.5 KiB held in b.pickle when it was taken: +4.0 KiB" in out
    assert "new: 1 stack, +4.0 KiB" in out
    assert "at me/train.py:7 keep (0 -> 4 allocations)" in out
    status, out, _ = call("snapshot", "diff", b, a, "--json")
    (change,) = json.loads(out)["changes"]
    assert (change["kind"], change["bytes"], change["place"]) == ("gone", -4096, "me/train.py:7 keep")
    status, out, _ = call("snapshot", "diff", a, a, "--at-peak")
    assert "Every stack holds as much in both." in out


def test_a_run_folder_stands_for_its_snapshot(call: Call) -> None:
    """As for `show` and `report`."""
    Path("run").mkdir()
    name = write("run/snapshot.pickle", snapshot(steps(5, keeps=True)))
    for command in (("leaks",), ("to-json",), ("diff", name)):
        of_folder = call("snapshot", *command, "run")
        assert of_folder[0] == 0, of_folder
        assert of_folder[1].replace("run ", f"{name} ") == call("snapshot", *command, name)[1]
    Path("empty").mkdir()
    status, _, err = call("snapshot", "leaks", "empty")
    assert status == 2
    assert "empty" in err


def test_leaks_says_what_grew_and_by_what_the_steps_were_found(call: Call) -> None:
    status, out, _ = call("snapshot", "leaks", write("a.pickle", snapshot(steps(5, keeps=True))))
    assert status == 0
    assert out.startswith("5 steps, found by the optimizer's steps in the stacks.\n")
    assert "1.0 KiB a step of other at me/train.py:7 keep: 5 allocations at the end" in out
    _, out, _ = call("snapshot", "leaks", "a.pickle", "--json")
    assert json.loads(out)["growths"][0]["total_bytes"] == 4096
    _, out, _ = call("snapshot", "leaks", write("b.pickle", snapshot(steps(5, keeps=False))))
    assert "Nothing grew from step to step." in out
    _, out, _ = call("snapshot", "leaks", write("c.pickle", snapshot(steps(2, keeps=True))))
    assert "To see what grows takes 3 steps" in out
    _, out, _ = call("snapshot", "leaks", write("d.pickle", written_by("2.1") | {"device_traces": [[]]}))
    assert out.startswith("No steps were found: neither metadata nor annotations")


def test_a_file_that_is_too_large_is_refused_by_its_size(call: Call) -> None:
    with Path("large.pickle").open("wb") as file:
        file.truncate(2**31)
    status, _, err = call("snapshot", "show", "large.pickle")
    assert status == 2
    assert "2,147,483,648 bytes, and at most 536,870,912 are read" in " ".join(err.split())
