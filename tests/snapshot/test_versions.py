"""Snapshots as every PyTorch from 2.1 to 2.15 writes them are read, shown, compared.

Which fields each writes (THCPModule_memorySnapshot of torch/csrc/cuda/Module.cpp and TraceEntry of
CUDACachingAllocator.h at the releases; recorded on the virtual GPU where PyTorch still runs on it):

- 2.1: segments with is_expandable and segment_pool_id; blocks with address, size, requested_size, state and
  frames; trace entries with action, addr (of an oom: device_free), size, stream, frames; no time.
- 2.2: time_us in trace entries.
- 2.6: external_annotations beside the segments.
- 2.9 and later: compile_context and user_metadata in trace entries, then pool_id.
- frames are left out of a trace entry that was recorded without a context.

A block whose free waits for another stream is "active_pending_free" in the file, "active_awaiting_free" in
the documentation of torch.cuda.memory._snapshot().
"""

import pickle
from pathlib import Path
from typing import Any

import pytest

from harness.report import read_run, report_tables, section_of
from harness.snapshot import diff_held, find_leaks, held_at, read_snapshot, recording_of
from tests.snapshot.test_from_stacks import STEP_OF_A_LOOP

MIB = 2**20
BASE = 0x7F00_0000_0000
FIELDS = {
    "2.1": (),
    "2.2": ("time_us",),
    "2.6": ("time_us", "external_annotations"),
    "2.9": ("time_us", "external_annotations", "compile_context", "user_metadata"),
    "2.13": ("time_us", "external_annotations", "compile_context", "user_metadata", "pool_id"),
}


def written_by(version: str, pending: str = "active_pending_free") -> dict[str, Any]:
    """A loop's step, an out-of-memory and the state after it, with the fields that `version` writes."""
    fields = FIELDS[version]
    oom = {"action": "oom", "device_free": MIB, "size": 3 * MIB, "frames": STEP_OF_A_LOOP[2]["frames"]}
    trace = []
    for i, entry in enumerate([*STEP_OF_A_LOOP, oom]):
        more = {
            "time_us": 1_700_000_000_000_000 + i,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
        }
        place = {"addr": BASE + entry["addr"]} if "addr" in entry else {}
        trace.append({**entry, **place, "stream": 0, **{k: v for k, v in more.items() if k in fields}})
        if not entry["frames"]:
            del trace[-1]["frames"]
    blocks = [
        {"address": BASE + offset, "size": size, "requested_size": asked, "state": state, "frames": []}
        for offset, size, asked, state in (
            (0, 512, 0, "inactive"),
            (512, 512, 500, "active_allocated"),
            (1024, 512, 500, pending),
            (1536, 2560, 0, "inactive"),
            (4096, 512, 512, "active_allocated"),
            (4608, 2 * MIB - 4608, 0, "inactive"),
        )
    ]
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 2 * MIB,
        "allocated_size": 1024,
        "active_size": 1536,
        "requested_size": 1012,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    whole: dict[str, Any] = {
        "segments": [segment],
        "device_traces": [trace, []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
    }
    if "external_annotations" in fields:
        whole["external_annotations"] = [
            {"stage": "END", "name": "## forward ##", "device": 0, "time_us": 1_700_000_000_000_003}
        ]
    return whole


@pytest.mark.parametrize("pending", ["active_pending_free", "active_awaiting_free"])
@pytest.mark.parametrize("version", FIELDS)
def test_every_version_is_read_and_explained(version: str, pending: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(written_by(version, pending)))
    run = read_run(path)
    assert run.history is not None
    assert (run.history.time_us is None) == (version == "2.1")
    assert run.history.oom is not None
    assert run.history.oom.requested_bytes == 3 * MIB
    section = section_of(run)
    assert section.answer[0] == "Memory ran out: 3.0 MiB were asked for, and the device had 1.0 MiB left."
    tables = {table.name: table for table in report_tables([section])}
    held = {
        row[0].value: row[1].value
        for row in tables["What is allocated when memory ran out, by category"].rows
    }
    assert held == {"parameters": 512, "optimizer_state": 512}  # what waits for a stream is freed
    recording = recording_of(read_snapshot(path))
    now = held_at(recording, recording.moment)
    assert diff_held(now, now).after_bytes == 1024
    assert find_leaks(recording, read_snapshot(path).get("external_annotations")).growths == []


def test_skipped_actions_do_not_make_memory_grow() -> None:
    """record_memory_history(skip_actions=[...]): the end of an allocation is told by what is left."""
    whole = written_by("2.13")
    both = [entry for e in whole["device_traces"][0] for entry in _with_completed(e)]
    for skipped in ("free_requested", "free_completed"):
        trace = [entry for entry in both if entry["action"] != skipped]
        recording = recording_of(whole | {"device_traces": [trace, []]})
        assert sum(span.size_bytes for span in recording.spans if span.live_at(len(trace))) == 1024
    # and an address that is given again was freed before
    never = [entry for entry in both if entry["action"] not in ("free_requested", "free_completed")]
    twice = [*never, *(entry for entry in never if entry["action"] == "alloc")]
    spans = recording_of({"segments": [], "device_traces": [twice]}).spans
    assert sum(span.live_at(len(twice)) for span in spans) == len({span.address for span in spans})


def _with_completed(entry: dict[str, Any]) -> list[dict[str, Any]]:
    completed = [{**entry, "action": "free_completed"}] if entry["action"] == "free_requested" else []
    return [entry, *completed]
