"""The recorded traces are what this package makes, action by action; and what a GPU does not change: speed
on, speed off.

Every recording can be made anew: benchmarks/virtual_gpu/anew.py. Here are some that are quick, and a sample.
So can the peaks that hold napkin's ranks (tests/recordings/ranks).
"""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_programme.trace_file import load_trace
from benchmarks.traces import missing_libraries
from benchmarks.virtual_gpu import anew
from benchmarks.virtual_gpu.recordings import RECORDED
from tests.support.places import RECORDINGS, ROOT

pytestmark = pytest.mark.virtual_gpu

QUICK = [
    pytest.param("--values", ("gpt2-medium", "8b-2-layers-packing", "8b-2-layers-nf4-lora"), id="values"),
    pytest.param("--no-values", ("gpt2-medium", "8b-2-layers-packing"), id="no values"),
    pytest.param(  # the optimizer computes on the host, on 12 GB of it
        "--values", ("8b-2-layers-offload-optimizer",), id="offload", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("values", "names"), QUICK)
def test_a_recording_is_made_anew(
    emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: str, names: tuple[str, ...]
) -> None:
    if other := missing_libraries(load_trace(RECORDED / "h200" / f"{names[0]}.json.gz")):
        pytest.skip("; ".join(other))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("VIRTUAL_GPU_ADDRESSES", "up")  # as when they were made
    chosen = [word for name in names for word in ("--only", name)]
    options = ("--part", "traces", "--out", str(tmp_path), *chosen)
    emulate(sys.executable, "-m", "benchmarks.gpu_programme", *options, gpu="h200", options=(values,))
    compare = (sys.executable, "-m", "benchmarks.virtual_gpu.recordings", str(tmp_path / "traces.json"))
    assert f"{len(names)} of {len(names)} are the same" in emulate(*compare, gpu="h200").stdout


@pytest.mark.slow
def test_a_sample_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    chosen = anew.sample(4, seed="test")
    rows = {row["recording"]: row for row in anew.made_anew(chosen, tmp_path)}
    assert rows.keys() == set(chosen)
    made = [row for row in rows.values() if "skipped" not in row]
    assert all(row["difference"] is None for row in made), made
    assert len(made) > 1 or "recorded with torch" in str(rows)


def test_a_hash_chooses_the_sample() -> None:
    everything = anew.names()
    assert sorted(anew.sample(len(everything), seed="any")) == everything
    assert anew.sample(5, seed="one") == anew.sample(9, seed="one")[:5]
    assert anew.sample(9, seed="one") != anew.sample(9, seed="other")


@pytest.mark.slow
def test_loops_of_two_ranks_peak_as_recorded(
    emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    loops = (sys.executable, "-m", "benchmarks.virtual_gpu.rank_loops", str(tmp_path / "2.json"))
    emulate(*loops, options=("--world-size", "2", "--rank", "0"))
    recorded = (RECORDINGS / "ranks" / "2.json").read_text()
    assert json.loads((tmp_path / "2.json").read_text()) == json.loads(recorded)
