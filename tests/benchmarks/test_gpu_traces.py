"""The file that a recorded allocation trace is kept in, and what reads it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from benchmarks import traces
from benchmarks.gpu_programme.recipes import TRACES, with_layers
from benchmarks.gpu_programme.trace_file import decode_trace, encode_trace, load_trace
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.recipe import Recipe, load_recipe
from harness.simulate.simulated_run import simulate
from harness.snapshot.safe_read import read_snapshot
from tests.support.gpu_results import trace_of

MIB = 2**20


def test_a_trace_file_keeps_all_but_long_stacks(tmp_path):
    """Of a simulated run, whose snapshot has what a real one has."""
    recipe = Recipe(model="tiny-llama-bytes", precision="bf16", seq_len=64)
    memory = simulate(recipe, find_hardware("h200"))[1]
    snapshot = memory.snapshot()
    trace = trace_of(snapshot["device_traces"][0], snapshot["segments"])
    data = encode_trace(trace)
    (tmp_path / "a.json.gz").write_bytes(data)
    read = load_trace(tmp_path / "a.json.gz")
    assert encode_trace(read) == data == encode_trace(trace)
    kept = ("action", "addr", "size", "stream", "user_metadata", "category")
    for ours, theirs in zip(read.entries, trace.entries, strict=True):
        assert [ours.get(key) for key in kept] == [theirs.get(key) for key in kept]
    assert [s["address"] for s in read.segments] == [s["address"] for s in trace.segments]
    assert read.segments[0]["blocks"][0].keys() == {"address", "size", "requested_size", "state", "frames"}


FIRST, SECOND = 0x7F0000000000, 0x7F0000200000
EVENTS = [
    ("segment_alloc", FIRST, 2 * MIB),
    ("alloc", FIRST, 512),
    ("alloc", FIRST + 512, 1000),
    ("segment_alloc", SECOND, 20 * MIB),
    ("alloc", SECOND, 2 * MIB),
    ("free_requested", FIRST, 512),
    ("free_completed", FIRST, 512),
    ("alloc", FIRST, 100),
]
"""What PyTorch 2.11 does with these requests: two tensors share the first 2 MiB, the third needs 20 MiB, the
last takes the smallest free block (best fit, CUDACachingAllocator.cpp)."""


def recorded(folder: Path, events: list[tuple[str, int, int]]) -> Path:
    """A trace file of `events`, with the segments they end with."""

    def segment(address: int, kind: str, *blocks: tuple[int, int, str]) -> dict[str, Any]:
        parts = [{"size": size, "requested_size": asked, "state": state} for size, asked, state in blocks]
        size = sum(part["size"] for part in parts)
        live = [part for part in parts if part["state"] == "active_allocated"]
        used = {f"{name}_size": sum(part["size"] for part in live) for name in ("allocated", "active")}
        asked = sum(part["requested_size"] for part in live)
        return {"address": address, "total_size": size, **used, "requested_size": asked, "stream": 0} | {
            "segment_type": kind,
            "is_expandable": False,
            "blocks": parts,
        }

    active, free = "active_allocated", "inactive"
    segments = [
        segment(FIRST, "small", (512, 100, active), (1024, 1000, active), (2 * MIB - 1536, 0, free)),
        segment(SECOND, "large", (2 * MIB, 2 * MIB, active), (18 * MIB, 0, free)),
    ]
    entries = [
        {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}
        for action, address, size in events
    ]
    provenance = {"versions": {"torch": "2.11.0+cu130"}, "settings": {}}
    path = folder / "by-hand.json.gz"
    path.write_bytes(encode_trace(trace_of(entries, segments, provenance=provenance)))
    return path


def test_a_trace_from_the_file_replays_through_the_allocator(tmp_path, capsys):
    """What the recorded traces are for."""
    path = recorded(tmp_path, EVENTS)
    made = traces.replayed(load_trace(path))
    assert made.divergence is None
    assert made.allocator.allocated_bytes == 512 + 1024 + 2 * MIB
    assert traces.main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == "by-hand: 5 requests, the same segments and blocks\n"


def test_a_trace_that_the_model_does_not_follow_is_shown(tmp_path, capsys):
    elsewhere = [*EVENTS[:-1], ("alloc", FIRST + 2048, 100)]
    assert traces.main(["replay", str(recorded(tmp_path, elsewhere))]) == 1
    said = capsys.readouterr().out
    assert f"entry 7 of 8: the model allocates at {FIRST}, the trace at {FIRST + 2048}" in said
    assert traces.main(["replay", str(recorded(tmp_path, EVENTS[:-1]))]) == 1
    assert "not the same blocks" in capsys.readouterr().out
    assert traces.main(["replay", str(tmp_path / "none.json.gz")]) == 2


def test_a_trace_unpacks_to_what_other_instruments_read(tmp_path, capsys):
    assert traces.main(["unpack", str(tmp_path / "out"), str(recorded(tmp_path, EVENTS))]) == 0
    snapshot = read_snapshot(tmp_path / "out" / "by-hand.pickle")
    assert [entry["action"] for entry in snapshot["device_traces"][0]] == [event[0] for event in EVENTS]
    assert "GiB" in _memory_viz.segsum(snapshot) or "MiB" in _memory_viz.segsum(snapshot)
    assert load_recipe(str(tmp_path / "out" / "by-hand.yaml"))[1].adapter == "lora"


def test_an_oom_keeps_the_free_bytes_of_the_device(tmp_path):
    entry = {"action": "oom", "device_free": 77, "size": 5, "stream": 0, "frames": []}
    read = decode_trace(encode_trace(trace_of([entry], [])))
    assert (read.entries[0]["device_free"], read.entries[0]["addr"]) == (77, 77)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not gzip",
        lambda data: data[:-20],
        lambda data: gzip.compress(b"[1]"),
        lambda data: gzip.compress(b'{"format": "harness-trace", "version": 2}'),
        lambda data: gzip.compress(b'{"format": "harness-trace", "version": 1}'),
    ],
)
def test_a_damaged_trace_is_refused(damage, tmp_path):
    entry = {"action": "alloc", "addr": 512, "size": 5, "stream": 0, "frames": []}
    path = tmp_path / "a.json.gz"
    path.write_bytes(damage(encode_trace(trace_of([entry], []))))
    with pytest.raises(InputError, match=r"a\.json\.gz"):
        load_trace(path)


def test_a_cut_model_comes_back_from_the_trace(tmp_path):
    spec = next(spec for spec in TRACES if spec.layers == 2)
    cut = with_layers(spec.recipe(), 2, tmp_path)
    fields = {**cut.model_dump(mode="json"), "model": "llama-3.1-8b-2-layers"}
    config = json.loads(Path(cut.model).read_bytes())
    trace = trace_of([], [], recipe_fields=fields, model_config=config)
    folder = tmp_path / "again"
    folder.mkdir()
    recipe = decode_trace(encode_trace(trace)).recipe(folder)
    assert json.loads(Path(recipe.model).read_bytes()) == config
    assert recipe.model_copy(update={"model": cut.model}) == cut
