"""`harness snapshot to-json`: the safe form of a snapshot holds the same, stays small, is read with care."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.snapshot import (
    AllocationSpan,
    read_snapshot,
    snapshot_of_storages,
    snapshot_to_json,
    write_snapshot,
)
from tests.support.commands import exit_status


def snapshot(allocations: int = 2) -> dict[str, Any]:
    stack = [{"filename": "ä<b>.py", "line": depth, "name": "f" * 20} for depth in range(20)]
    return snapshot_of_storages(
        [AllocationSpan(i, 512, i, None, "forward", frames=stack) for i in range(1, allocations + 1)]
    )


def written(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "snapshot.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def test_it_reads_back_equal_with_its_stacks_shared(tmp_path: Path) -> None:
    original = snapshot()
    original["segments"][0]["more"] = {"nested": [1, None, "x"]}
    read = read_snapshot(written(tmp_path, snapshot_to_json(original)))
    assert read == original
    first, second = read["device_traces"][0][:2]
    assert first["frames"] is second["frames"] is read["segments"][0]["blocks"][0]["frames"]
    assert type(first["pool_id"]) is tuple
    write_snapshot(tmp_path / "again.pickle", read)
    assert read_snapshot(tmp_path / "again.pickle") == original


def test_a_shared_stack_is_written_once(tmp_path: Path) -> None:
    text = snapshot_to_json(snapshot(500))
    assert text.count("ä<b>.py") == 20
    assert len(text) < len(json.dumps(snapshot(500))) / 4


def test_the_command_writes_a_file_or_stdout(tmp_path, monkeypatch, capfd) -> None:
    source = tmp_path / "snapshot.pickle"
    write_snapshot(source, snapshot())
    assert exit_status("snapshot", "to-json", str(source), "--out", str(tmp_path / "a.json")) == 0
    assert capfd.readouterr() == ("", "")
    assert read_snapshot(tmp_path / "a.json") == snapshot()
    assert exit_status("snapshot", "to-json", str(source)) == 0
    assert capfd.readouterr().out == (tmp_path / "a.json").read_text(encoding="utf-8")
    assert exit_status("snapshot", "to-json", str(tmp_path / "a.json")) == 0  # JSON in, the same JSON out
    assert capfd.readouterr().out == (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(print), "STACK_GLOBAL"),
        (pickle.dumps({"segments": [], "device_traces": [], "x": float("nan")}, 4), "written as JSON"),
        (pickle.dumps({"segments": [], "device_traces": [], "x": {(1, 2): 3}}, 4), "keys should be strings"),
        (None, "No such file"),
    ],
    ids=["code", "nan", "a pair as a key", "missing"],
)
def test_what_cannot_be_converted_is_said_and_leaves_nothing(
    content, said, tmp_path, monkeypatch, capfd
) -> None:
    if content is not None:
        (tmp_path / "bad.pickle").write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert (
        exit_status("snapshot", "to-json", str(tmp_path / "bad.pickle"), "--out", str(tmp_path / "a.json"))
        == 2
    )
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), said in err) == ("", 1, True), err
    assert sorted(tmp_path.iterdir()) == before


BAD: dict[str, tuple[Any, str]] = {
    "another version": ({"version": 2}, "version 2"),
    "true as the version": ({"version": True}, "version True"),
    "no stacks": ({"stacks": None}, "no list of stacks"),
    "no snapshot": ({"snapshot": None}, "top level"),
    "a stack too far": ({"stacks": []}, "stack 0 of 0"),
    "a stack that is no list": ({"stacks": [7, 7]}, "frames"),
    "a stack that is an index": ({"stacks": [[0], [0]]}, "frames"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_document_is_refused(name: str, tmp_path: Path) -> None:
    changes, said = BAD[name]
    document = json.loads(snapshot_to_json(snapshot()))
    with pytest.raises(InputError, match=said):
        read_snapshot(written(tmp_path, document | changes))


def test_a_negative_stack_index_is_refused(tmp_path: Path) -> None:
    document = json.loads(snapshot_to_json(snapshot()))
    document["snapshot"]["device_traces"][0][0]["frames"] = -1
    with pytest.raises(InputError, match="stack -1 of 2"):
        read_snapshot(written(tmp_path, document))


@pytest.mark.parametrize("where", ["action", "user_metadata"])
def test_text_that_cannot_be_printed_is_refused(where: str, tmp_path: Path) -> None:
    """Half a surrogate pair is a str in Python that no file and no terminal takes."""
    broken = copy.deepcopy(snapshot())
    broken["device_traces"][0][0][where] = "\ud800"
    for content in (
        pickle.dumps(broken, 4),
        json.dumps(broken).encode(),  # "\\ud800"
        json.dumps(broken, ensure_ascii=False).encode("utf-8", "surrogatepass"),
    ):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(InputError, match=r"damaged|not UTF-8"):
            read_snapshot(tmp_path / "bad")


def test_sizes_end_where_64_bits_end(tmp_path: Path) -> None:
    for size, fits in ((2**63 - 1, True), (2**63, False)):
        entry = {"action": "alloc", "addr": 0, "size": size, "time_us": 0}
        path = written(tmp_path, {"segments": [], "device_traces": [[entry]]})
        if fits:
            assert read_snapshot(path)["device_traces"] == [[entry]]
        else:
            with pytest.raises(InputError, match=r"\['size'\]"):
                read_snapshot(path)
