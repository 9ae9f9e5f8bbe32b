"""A sample of benchmarks.causal_models --vision: the peaks PyTorch counted on the virtual GPU."""

import json
from pathlib import Path

import pytest

from benchmarks.causal_models.__main__ import models_that_see, versions
from benchmarks.causal_models.vision import VISION_METHODS
from tests.support.emulated_peaks import check_peaks

FOUND = json.loads((Path(__file__).parents[2] / "profiles/cpu/vision_models.json").read_bytes())
ROWS = {(row["type"], row["method"]): row for row in FOUND["rows"]}
SAMPLE = (
    ("gemma3", "images lora"),
    ("gemma3", "images and tower"),
    ("llava", "images"),
    ("mistral3", "images lora"),
    ("qwen2_5_vl", "images"),
    ("qwen2_5_vl", "images lora"),
    ("qwen2_5_vl", "text alone"),
    ("qwen3_vl", "images and tower"),
)

pytestmark = pytest.mark.skipif(
    versions() != FOUND["versions"], reason="the emulated peaks are of other releases"
)


@pytest.mark.parametrize(("kind", "method"), SAMPLE)
def test_the_peaks_are_those_that_pytorch_counted(kind: str, method: str, tmp_path: Path) -> None:
    check_peaks(ROWS[kind, method]["emulated"], kind, method, tmp_path)


def test_every_type_whose_processor_is_known_is_in_the_table() -> None:
    assert {kind for kind, _ in ROWS} == {*models_that_see()}
    assert {method for _, method in ROWS} == {*VISION_METHODS}


@pytest.mark.parametrize("method", ["images", "images lora", "text alone"])
def test_with_a_frozen_tower_all_are_the_same_to_the_byte(method: str) -> None:
    trained = [row for (_, each), row in ROWS.items() if each == method and "trains" not in row]
    assert len(trained) > 8
    for row in trained:
        assert isinstance(row.get("simulated"), dict), row
        assert row["apart"]["allocated"] == row["apart"]["first step"] == 0, row
