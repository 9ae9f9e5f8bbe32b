"""The peaks that hold napkin's ranks (tests/recordings/ranks) are what hand-written loops have today."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.places import RECORDINGS, ROOT

pytestmark = pytest.mark.virtual_gpu


@pytest.mark.slow
def test_loops_of_two_ranks_peak_as_recorded(
    emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    loops = (sys.executable, "-m", "benchmarks.virtual_gpu.rank_loops", str(tmp_path / "2.json"))
    emulate(*loops, options=("--world-size", "2", "--rank", "0"))
    recorded = (RECORDINGS / "ranks" / "2.json").read_text()
    assert json.loads((tmp_path / "2.json").read_text()) == json.loads(recorded)
