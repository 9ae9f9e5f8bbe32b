"""What PyTorch's CUDA build allocated on a stand-in for the CUDA runtime, against both models, to the byte.

tests/data/stand_in/<device> was recorded with `python -m tests.stand_in_cuda` and `benchmarks.import_gpu`.
The allocator model must do with every request what PyTorch's allocator did; and the simulation of the
recipe, where the libraries are those of the recording, must make the same requests in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.gpu_trace_file import Trace, load_trace
from benchmarks.traces import replayed, same_segments, settings_of
from harness.hardware import find_hardware
from harness.hardware_table import SM_COUNTS
from harness.provenance import installed_version
from harness.simulate import simulate
from harness.simulated_memory import SimulatedMemory
from harness.step_profile import StepProfile
from harness.trace_diff import Divergence, diff_traces
from tests.stand_in_cuda.__main__ import surroundings

RECORDED = sorted((Path(__file__).parent / "data" / "stand_in").glob("*/*.json.gz"))
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
traces = pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name[:-8]}")


@lru_cache(maxsize=1)
def loaded(path: Path) -> Trace:
    return load_trace(path)


def simulated(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[StepProfile, SimulatedMemory]:
    """The simulation of the recorded recipe. Skips where the libraries are not those of the recording."""
    trace = loaded(path)
    for name in LIBRARIES:
        theirs, ours = trace.provenance["versions"][name], installed_version(name) or "none"
        if theirs.partition("+")[0] != ours.partition("+")[0]:
            pytest.skip(f"recorded with {name} {theirs}, and {ours} is installed")
    for name, value in trace.provenance["settings"].items():
        monkeypatch.setenv(name, value)
    return simulate(trace.recipe(folder), find_hardware(path.parent.name), settings_of(trace))


def peak(trace: Trace, quantity: str, steps: Sequence[int]) -> int:
    return max(phase[f"{quantity}_bytes.all.peak"] for phase in trace.phases if phase["step"] in steps)


def only_frees_of_autocast(divergences: Sequence[Divergence]) -> bool:
    """autocast frees the casts it kept in the order of a hash of their addresses, another one each time."""
    real = [event for divergence in divergences for event in divergence.only_real]
    ours = [event for divergence in divergences for event in divergence.only_simulated]
    by_autocast = [any(f["filename"].endswith("autocast_mode.py") for f in event.frames) for event in real]
    same = Counter(event.token for event in real) == Counter(event.token for event in ours)
    return same and all(by_autocast) and all(event.action == "free" for event in real)


def test_there_are_recordings() -> None:
    assert len(RECORDED) >= 24


@traces
def test_the_allocator_does_what_pytorch_did(path: Path) -> None:
    trace = loaded(path)
    made = replayed(trace)
    assert made.divergence is None
    assert made.requests > 1000
    assert same_segments(trace, made)


@traces
def test_the_simulation_makes_the_recorded_requests(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = loaded(path)
    profile, memory = simulated(path, tmp_path, monkeypatch)
    diff = diff_traces(trace.entries, memory.snapshot()["device_traces"][0])
    assert min(phase.real_events for phase in diff.phases) > 0
    if trace.oom is not None:
        _ran_out_alike(trace, profile)
        return
    assert only_frees_of_autocast(diff.divergences)

    steps = [phase["step"] for phase in trace.phases]
    last = range(1, max(steps) + 1)
    assert profile.memory.setup_peak_allocated_bytes == peak(trace, "allocated", [-1])
    assert profile.memory.first_step_peak_allocated_bytes == peak(trace, "allocated", [0])
    assert profile.memory.peak_allocated_bytes == peak(trace, "allocated", last)
    assert profile.memory.peak_reserved_bytes == peak(trace, "reserved", last)


def _ran_out_alike(trace: Trace, profile: StepProfile) -> None:
    """The same request failed in the same phase, with as much memory reserved and unallocated."""
    assert profile.oom is not None
    failed = next(index for index, entry in enumerate(trace.entries) if entry["action"] == "oom")
    assert profile.oom.requested_bytes == trace.entries[failed]["size"]
    assert trace.entries[failed]["user_metadata"].endswith(f"phase={profile.oom.phase}")
    live: dict[int, int] = {}
    reserved = 0
    for entry in trace.entries[:failed]:
        change = {"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0)
        reserved += change * entry["size"]
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_requested":
            del live[entry["addr"]]
    requested = sum(live.values())
    # unallocated in blocks, requested in bytes: a block is larger by less than 512 bytes, or 1 MiB unsplit
    assert profile.oom.reserved_unallocated_bytes is not None
    assert 0 <= reserved - requested - profile.oom.reserved_unallocated_bytes <= 2**20 * len(live)


@pytest.mark.parametrize("device", SM_COUNTS)
def test_every_device_of_the_table_has_a_stand_in(device: str) -> None:
    there = surroundings(device, [Path("libcudart.so.13")])
    assert int(there["FAKE_CAPACITY"]) < int(there["FAKE_TOTAL"])
    assert there["FAKE_PROCESSORS"] == str(SM_COUNTS[device])
