"""What PyTorch allocated on an H100 or H200, against the allocator model and the simulation, to the byte.

tests/recordings/traces was recorded by `make gpu` (benchmarks/gpu_programme) with PyTorch 2.11 and
transformers 5.17. Simulated with those libraries a recipe makes the recorded requests (`make window`); with
later ones, whose code allocates in another order here and there, it still needs the same memory.
"""

from itertools import combinations

import pytest

from benchmarks.gpu_programme.trace_file import Trace, load_trace
from benchmarks.traces import RECORDINGS, compared, hardware_of, missing_libraries, replayed, same_segments
from harness.allocator.addresses import DriverAddresses
from tests.support.long import but_for
from tests.support.releases import keeps_workspaces

RECORDED = {path.name[:-8]: path for path in sorted(RECORDINGS.glob("traces/*.json.gz"))}
OTHERWISE = {
    "8b-2-layers-int8-lora": "which columns of an int8 product hold outliers depends on values",
    "1b-flex-attention-lora": "flex attention is simulated as a later PyTorch compiles it",
    "8b-2-layers-flex-attention": "flex attention is simulated as a later PyTorch compiles it",
}
USUAL = [
    *("1b-bf16", "1b-lora-dropout", "8b-2-layers-nf4-lora", "1b-fp16-mixed-clipped", "1b-bf16-little-memory"),
    *("8b-2-layers-offload-activations", "1b-bf16-expandable-segments", "gpt2-medium"),
]
of_each = pytest.mark.parametrize("trace", but_for(set(USUAL), RECORDED), indirect=True)


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest) -> Trace:
    return load_trace(request.param)


def test_there_are_recordings() -> None:
    assert len(RECORDED) == 27
    assert {*USUAL, *OTHERWISE} < RECORDED.keys()


@of_each
def test_the_allocator_does_what_pytorch_did(trace: Trace) -> None:
    made = replayed(trace)
    assert made.divergence is None
    assert same_segments(trace, made)


@keeps_workspaces
@of_each
def test_the_simulation_needs_the_recorded_memory(trace: Trace) -> None:
    result = compared(trace, hardware_of(trace))
    peaks = result.peaks()
    assert result.profile.oom is None
    assert (trace.oom is None) == (result.profile.oom is None)
    if trace.name in OTHERWISE:
        real, simulated = peaks["allocated"]
        assert simulated != real
        assert simulated == pytest.approx(real, rel=0.02)
    elif missing_libraries(trace):
        assert peaks["allocated"][1] == pytest.approx(peaks["allocated"][0], rel=0.0003)
        assert peaks["reserved"][1] == pytest.approx(peaks["reserved"][0], rel=0.07)
    else:
        assert result.same_requests
        assert {real == simulated for real, simulated in peaks.values()} == {True}


def test_the_driver_gives_lower_and_lower_addresses() -> None:
    """A GPU's driver maps its first regions into holes between libraries; then the order is the model's."""
    alike = pairs = 0
    for path in RECORDED.values():
        trace = load_trace(path)
        events = [event for event in trace.entries if event["action"] == "segment_alloc"]
        if any(event["action"].startswith(("segment_free", "segment_map")) for event in trace.entries):
            continue
        model = DriverAddresses()
        segments = [(event["size"], event["addr"], model.take(event["size"])) for event in events]
        for one, other in combinations(segments, 2):
            if one[0] == other[0]:
                pairs += 1
                alike += (one[1] < other[1]) == (one[2] < other[2])
    assert pairs > 100_000
    assert alike / pairs > 0.99


def test_what_is_left_of_a_region_is_taken_from_the_lowest_address_on() -> None:
    mib = 2**20
    model = DriverAddresses()
    first, second, third = (model.take(20 * mib) for _ in range(3))
    assert (first - second, second - third) == (32 * mib, 32 * mib)
    assert model.take(10 * mib) == third + 20 * mib
    assert model.take(2 * mib) == third + 30 * mib
    assert model.take(2 * mib) == second + 20 * mib
    assert model.take(64 * mib) == third - 64 * mib
    model.give_back(first, 20 * mib)
    assert model.take(18 * mib) == first
