"""What PyTorch's CUDA build allocated on a virtual GPU, against both models, to the byte.

tests/recordings/virtual_gpu/<device> was recorded with `harness emulate`, and
brought here by `benchmarks.gpu_programme.import_results`.
The allocator model must do with every request what PyTorch's allocator did; and the simulation of the
recipe, where the libraries are those of the recording, must make the same requests in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.gpu_programme.trace_file import Trace, load_trace
from benchmarks.traces import RECORDINGS, compared, hardware_of, missing_libraries, replayed, same_segments
from harness.hardware.table import SM_COUNTS
from harness.virtual_gpu.device import device_variables

RECORDED = sorted(RECORDINGS.glob("virtual_gpu/*/*.json.gz"))
traces = pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name[:-8]}")


@lru_cache(maxsize=1)
def loaded(path: Path) -> Trace:
    return load_trace(path)


def test_there_are_recordings() -> None:
    assert len(RECORDED) >= 48
    assert any(loaded(path).oom is not None for path in RECORDED)


@traces
def test_the_allocator_does_what_pytorch_did(path: Path) -> None:
    trace = loaded(path)
    made = replayed(trace)
    assert made.divergence is None
    assert made.requests > 300
    assert same_segments(trace, made)


@traces
def test_the_simulation_makes_the_recorded_requests(path: Path) -> None:
    trace = loaded(path)
    if other := missing_libraries(trace):
        pytest.skip("; ".join(other))
    result = compared(trace, hardware_of(trace))
    assert sum(phase.real_events for phase in result.diff.phases) > 200
    assert result.same_requests
    assert (result.profile.oom is None) == (trace.oom is None)
    for name, (real, simulated) in result.peaks().items():
        assert simulated == real, name


@pytest.mark.parametrize("device", SM_COUNTS)
def test_every_device_of_the_table_can_be_virtual(device: str) -> None:
    there = device_variables(device, 1)
    assert int(there["VIRTUAL_GPU_CAPACITY"]) < int(there["VIRTUAL_GPU_TOTAL"])
    assert there["VIRTUAL_GPU_PROCESSORS"] == str(SM_COUNTS[device])
