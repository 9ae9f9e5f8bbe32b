"""What PyTorch's CUDA build allocated on a virtual GPU, against both models, to the byte.

tests/recordings/virtual_gpu/<device> was recorded with `harness emulate`, and
brought here by `benchmarks.gpu_programme.import_results`.
The allocator model must do with every request what PyTorch's allocator did; and the simulation of the
recipe, where the libraries are those of the recording, must make the same requests in the same order.
"""

import pytest

from benchmarks.gpu_programme.trace_file import Trace, load_trace
from benchmarks.traces import RECORDINGS, compared, hardware_of, missing_libraries, replayed, same_segments
from tests.support.long import but_for

RECORDED = {
    f"{path.parent.name}-{path.name[:-8]}": path
    for path in sorted(RECORDINGS.glob("virtual_gpu/*/*.json.gz"))
}


ALONE_IN_A_LINE = {
    *("a100-80gb-random-1-13", "a100-80gb-random-1-14", "a100-80gb-random-1-15", "b200-random-6-15"),
    *("h200-random-10-4", "h200-random-10-6", "rtx-4090-random-3-10", "rtx-4090-random-3-12"),
    *("t4-random-2-12", "t4-random-2-17"),
}
"""Of the recipes drawn at random, those that run a line of harness/ that no other one runs of the usual."""


def usual() -> set[str]:
    """Each recipe that was written down on the first device that has it, and every eighth drawn at random.

    `make test-long` has the others, which run no line of harness/ that these do not, traced line by line.
    """
    seen: set[str] = set()
    found = set(ALONE_IN_A_LINE)
    for name, path in RECORDED.items():
        kind, _, number = path.name[:-8].rpartition("-")
        if int(number) % 8 == 0 if kind.startswith("random") else path.name not in seen:
            found.add(name)
        seen.add(path.name)
    return found


of_each = pytest.mark.parametrize("trace", but_for(usual(), RECORDED), indirect=True)


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest) -> Trace:
    """Read once for its tests, which therefore run after one another."""
    return load_trace(request.param)


def test_there_are_recordings() -> None:
    assert len(RECORDED) >= 48 <= len(usual())
    assert usual() < RECORDED.keys()
    assert any(load_trace(RECORDED[name]).oom is not None for name in usual())


@of_each
def test_the_allocator_does_what_pytorch_did(trace: Trace) -> None:
    made = replayed(trace)
    assert made.divergence is None
    assert made.requests > 300
    assert same_segments(trace, made)


@of_each
def test_the_simulation_makes_the_recorded_requests(trace: Trace) -> None:
    if other := missing_libraries(trace):
        pytest.skip("; ".join(other))
    result = compared(trace, hardware_of(trace))
    assert sum(phase.real_events for phase in result.diff.phases) > 200
    assert result.same_requests
    assert (result.profile.oom is None) == (trace.oom is None)
    for name, (real, simulated) in result.peaks().items():
        assert simulated == real, name
