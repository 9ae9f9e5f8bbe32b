"""What is watched on a virtual GPU, against the statistics PyTorch keeps when nobody watches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.virtual_gpu.watched import CASES, LIBRARIES, both

pytestmark = pytest.mark.virtual_gpu
FEW = ("plain loop", "TRL SFTTrainer")
LEAVES_THE_GPU = ("plain loop", "Lightning")
"""They take the model off it before they end; their peak is after the first step, which has no states yet."""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FEW]


@pytest.mark.parametrize("name", [*FEW, *SLOW])
def test_categories_add_up_to_the_peak_of_the_unwatched_program(name: str, tmp_path: Path) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    command, steps = CASES[name]
    rows = both(command, steps, tmp_path)
    assert len(rows) == (2 if "2 ranks" in name else 1)
    for row in rows:
        assert row["source"] == "emulated"
        assert row["complete"]
        assert row["steps"] == steps
        assert set(row["phases"]) >= {"forward", "backward", "optimizer_step"}
        assert row["sum_of_categories_bytes"] == row["peak_bytes"]
        assert 0 < row["at_peak"]["parameters_bytes"] < row["peak_bytes"]
        if name in LEAVES_THE_GPU:
            assert 0 < row["at_peak"]["optimizer_state_bytes"] < row["peak_bytes"]
        assert row["sum_of_categories_bytes"] == pytest.approx(row["unwatched_peak_bytes"], rel=0.001)
