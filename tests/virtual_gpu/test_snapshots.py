"""Snapshots of somebody's program, by PyTorch's CUDA build: what is said of them is what PyTorch counts."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from harness.cli.terminal.snapshots import print_leaks
from harness.report import ReportRun, read_run, section_of
from harness.snapshot import Leaks, diff_held, find_leaks, held_at, read_snapshot, recording_of, remedy
from harness.system import TorchRelease
from tests.support.commands import run_harness
from tests.support.places import ROOT
from tests.virtual_gpu.conftest import Emulate

pytestmark = pytest.mark.virtual_gpu
PROGRAM = ROOT / "tests/virtual_gpu/programs/recorded.py"


@pytest.fixture
def record(emulate: Emulate, tmp_path: Path) -> Any:
    """(the snapshot's path, what PyTorch counted) of the program, recorded in one way."""

    def run(how: str, **options: Any) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / f"{how}.pickle"
        done = emulate(sys.executable, str(PROGRAM), how, str(path), gpu="rtx-4090", **options)
        return path, json.loads(done.stdout.splitlines()[-1])

    return run


def read(path: Path, device: int | None = None) -> ReportRun:
    run = read_run(path, device)
    assert run.history is not None
    return run


def test_an_out_of_memory_is_told_as_pytorch_counts_it(record: Any) -> None:
    path, counted = record("oom")
    oom = read(path).history.oom  # type: ignore[union-attr]
    assert oom is not None
    told = {
        "requested": oom.requested_bytes,
        "free": oom.device_free_bytes,
        "allocated": oom.allocated_bytes,
        "reserved": oom.reserved_bytes,
    }
    assert told == counted["oom"]
    assert not oom.fragmented
    section = section_of(read(path))
    assert "recorded.py" in section.words["asked_at"]
    assert "activations" in [row[0].value for row in section.tables["groups"].rows]


@pytest.mark.slow
def test_what_is_said_to_help_helps(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of every segment is free: enough in all. With expandable_segments the same program goes on."""
    path, counted = record("pieces")
    oom = read(path).history.oom  # type: ignore[union-attr]
    assert oom is not None
    assert oom.fragmented
    assert oom.largest_piece_bytes == 2**29
    assert oom.free_in_segments_bytes == counted["oom"]["reserved"] - counted["oom"]["allocated"]
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in remedy(oom)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    path, counted = record("pieces")
    assert "oom" not in counted
    assert read(path).history.oom is None  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["none", "state"])
def test_without_a_trace_the_state_is_shown(record: Any, how: str) -> None:
    path, counted = record(how)
    history = read(path).history
    assert history is not None
    assert history.events == 0
    assert history.moment()[1] == counted["end"]["allocated"]
    assert history.reserved_at_end_bytes == counted["end"]["reserved"]
    assert sum(segment.size_bytes for segment in history.segments_then) == counted["end"]["reserved"]
    named = {history.groups[code] for code in history.group_of_span.tolist()}
    assert ({"parameters", "optimizer_state"} <= named) == (how == "state")


@pytest.mark.parametrize("how", ["all", "cpp", "short"])
def test_what_is_held_at_the_end_adds_up(record: Any, how: str) -> None:
    """Python stacks, C++ stacks, a trace cut short by max_entries."""
    path, counted = record(how)
    recording = recording_of(read_snapshot(path))
    held = held_at(recording, recording.moment)
    assert sum(amount.total_bytes for amount in held.values()) == counted["end"]["allocated"]
    by_category = {name: after for name, (_, after) in diff_held({}, held).by_category().items()}
    parameters = 4 * (4 * (2 * 4 * 1024 * 1024 + 5 * 1024))
    assert by_category["parameters"] == parameters
    assert by_category["optimizer_state"] == pytest.approx(2 * parameters, abs=16 * 512)  # a step count each


def test_the_device_is_chosen(record: Any) -> None:
    path, counted = record("two", options=("--gpus", "2"))
    for device, name in ((None, "end"), (0, "end"), (1, "second")):
        history = read(path, device).history
        assert history is not None
        assert int(history.allocated_bytes()[-1]) == counted[name]["allocated"]
        assert "0 (" in history.notes[0]
        assert "1 (" in history.notes[0]


@pytest.fixture
def leak(emulate: Emulate, tmp_path: Path) -> Leaks:
    program, path = tmp_path / "train" / "train.py", tmp_path / "leak.pickle"
    program.parent.mkdir()
    shutil.copy(PROGRAM, program)
    emulate(sys.executable, str(program), "leak", str(path), gpu="rtx-4090")
    snapshot = read_snapshot(path)
    return find_leaks(recording_of(snapshot), snapshot["external_annotations"])


def test_a_leak_is_found_by_its_stack(leak: Leaks) -> None:
    assert leak.steps_from == "torch's annotations of the steps"
    line = next(
        i for i, text in enumerate(PROGRAM.read_text().splitlines(), 1) if "kept.append(output" in text
    )
    kept = 4 * 256 * 1024 * 4  # since the first step: four outputs in fp32
    assert [(growth.holder.place, growth.total_bytes) for growth in leak.growths] == [
        (f"train/train.py:{line} train", kept)
    ]
    assert leak.allocated_bytes[-1] - leak.allocated_bytes[0] == kept


@pytest.mark.skipif(
    TorchRelease.of(torch.__version__) != (2, 13),
    reason="the guide's excerpt is of PyTorch 2.13: workspaces of other releases have other sizes",
)
def test_the_guide_s_leak_is_what_is_said(leak: Leaks, tmp_path: Path) -> None:
    said = io.StringIO()
    print_leaks(Console(file=said, width=120), leak)
    excerpt = said.getvalue().replace(str(tmp_path), "/tmp")
    assert f"```text\n{excerpt}```" in (ROOT / "docs/snapshots.md").read_text()


def test_stacks_alone_say_the_categories_that_a_run_states(tmp_path: Path) -> None:
    """A run of the harness states its phases and owners. Without them, its stacks say the same."""
    overrides = ("gradient_checkpointing=true", "seq_len=128", "micro_batch_size=2")
    command = ("run", "smoke", "--gpu", "rtx-4090", "--out", str(tmp_path / "run"), *overrides)
    run_harness(*command, cwd=tmp_path)
    snapshot = read_snapshot(tmp_path / "run" / "snapshot.pickle")
    stated = recording_of(snapshot)
    for trace in snapshot["device_traces"]:
        for entry in trace:
            entry.pop("user_metadata", None)
            entry.pop("category", None)
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block.pop("category", None)
    read = recording_of(snapshot)
    assert (stated.from_stacks, read.from_stacks) == (False, True)
    assert stated.categories is not None
    assert read.categories is not None
    pairs = [
        (one, other)
        for span, one, other in zip(stated.spans, stated.categories, read.categories, strict=True)
        if span.born >= 0
    ]
    for name in ("activations", "gradients"):
        assert sum(one == name for one, _ in pairs) > 20
        assert {pair for pair in pairs if name in pair} == {(name, name)}
    # what was there before has only the stacks of its blocks
    assert {"parameters", "optimizer_state"} <= set(read.categories)
    # a batch that the loop moves itself is the program's own; so are a few numbers kept for the log
    assert {pair for pair in pairs if pair[0] != pair[1]} <= {
        ("inputs", "other"),
        ("temporaries", "other"),
        ("temporaries", "optimizer_state"),
    }
    assert sum(one != other for one, other in pairs) < len(pairs) / 100
