"""Runs for the tests of reports: really measured, really simulated, and one written by hand."""

from pathlib import Path
from typing import Any

import torch

from harness.hardware.hardware import find_hardware
from harness.measure import Silent, measure
from harness.run_folder.run_folder import RunFolder
from harness.simulate.simulated_run import simulate
from harness.snapshot import TraceEvent, build_snapshot, phase_metadata, write_snapshot
from tests.support.tiny import tiny

MIB = 2**20
BASE = 0x7F00_0000_0000
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def measured_run(folder: Path) -> Path:
    """A run folder of a tiny llama on the CPU."""
    recipe = tiny(steps=2, warmup_steps=1)
    measure(recipe, RunFolder(folder, "tiny", recipe), Silent(), torch.device("cpu"))
    return folder


def simulated_run(folder: Path, **fields: Any) -> Path:
    """A run folder of a tiny llama simulated on an L4."""
    recipe = tiny(precision="bf16", **fields)
    profile, memory = simulate(recipe, find_hardware("l4"))
    run = RunFolder(folder, "tiny", recipe)
    run.write_snapshot(memory.snapshot())
    run.write_profile(profile)
    return folder


def hand_made_snapshot(name: str = "train_step") -> dict[str, Any]:
    """Ten allocations and frees in a 20 MiB segment and a 2 MiB one, which is given back.

    There before: 4 MiB. By event: inputs +1, activations +6, temporaries +2, -2, small +0.5, gradients +3
    (the peak, 14.5 MiB), activations -6, small -0.5, gradients -3, inputs -1.
    """
    frames = {
        what: [
            {"filename": f"/x/{what}.py", "line": 7, "name": name},
            {"filename": "/x/main.py", "line": 1, "name": "<module>"},
        ]
        for what in ("inputs", "activations", "temporaries", "gradients")
    }
    # what, phase, action, offset and size in MiB
    happens: list[tuple[str, str, Any, float, float]] = [
        ("inputs", "data", "alloc", 4, 1),
        ("activations", "forward", "alloc", 5, 6),
        ("temporaries", "forward", "alloc", 11, 2),
        ("temporaries", "forward", "free_requested", 11, 2),
        ("temporaries", "backward", "segment_alloc", 64, 2),
        ("temporaries", "backward", "alloc", 64, 0.5),
        ("gradients", "backward", "alloc", 11, 3),
        ("activations", "backward", "free_requested", 5, 6),
        ("temporaries", "backward", "free_requested", 64, 0.5),
        ("temporaries", "backward", "segment_free", 64, 2),
        ("gradients", "optimizer_step", "free_requested", 11, 3),
        ("inputs", "optimizer_step", "free_requested", 4, 1),
    ]
    events = [
        TraceEvent(
            action,
            BASE + int(offset * MIB),
            int(size * MIB),
            phase_metadata(phase),
            frames[what],
            category=what,
            time_us=i,
        )
        for i, (what, phase, action, offset, size) in enumerate(happens)
    ]
    held = {"address": BASE, "size": 4 * MIB, "requested_size": 4 * MIB, "state": "active_allocated"}
    free = {"address": BASE + 4 * MIB, "size": 16 * MIB, "requested_size": 0, "state": "inactive"}
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 20 * MIB,
        "allocated_size": 4 * MIB,
        "active_size": 4 * MIB,
        "is_expandable": False,
        "segment_type": "large",
        "blocks": [held | {"frames": []}, free | {"frames": []}],
    }
    return build_snapshot(events, [segment])


def write_hand_made(folder: Path, name: str = "train_step") -> Path:
    """The hand-made snapshot in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_snapshot(folder / "snapshot.pickle", hand_made_snapshot(name))
    return folder / "snapshot.pickle"
