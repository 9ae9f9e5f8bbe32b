"""The formulas that come with the recipes are those of today's code."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.allocator import parse_settings
from harness.formula import Formula, load, point_of, timed_on
from harness.formula.store import MAKE_REQUESTS, shipped_path
from harness.hardware import Hardware, all_hardware
from harness.recipe import Recipe
from harness.simulate import simulate
from harness.system import installed_version, recipes_folder
from tests.support.releases import of_tested_releases

FILES = sorted((recipes_folder() / "formulas").glob("*.json.gz"))
HELD_AGAINST_A_SIMULATION = [file for file in FILES if ".sm_90." in file.name]


def document(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()))


def device_of(found: Any) -> Hardware:
    """One of the GPUs that the formula is for, with times if it has some of any."""
    capability, sm_count, _ = found["key"]["gpu"]
    alike = [
        device
        for device in all_hardware()
        if (device.datasheet.compute_capability, device.sm_count) == (capability, sm_count)
    ]
    timed = " ".join(found["times"])
    return next((device for device in alike if timed_on(device) in timed), alike[0])


def at_its_first_point(found: Any) -> Recipe:
    rows, tokens = found["pieces"][0]["points"][0]
    return Recipe(**found["key"]["recipe"], micro_batch_size=rows, seq_len=tokens)


def test_there_are_some() -> None:
    assert len(FILES) > 50


@of_tested_releases(*MAKE_REQUESTS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_it_is_found_by_what_it_is_for(file: Path) -> None:
    found = document(file)
    assert shipped_path(found["key"]) == file
    loaded = load(at_its_first_point(found), device_of(found))
    assert [[list(point) for point in piece.points] for piece in loaded.pieces] == [
        piece["points"] for piece in found["pieces"]
    ]


@of_tested_releases(*MAKE_REQUESTS)
def test_a_file_of_other_defaults_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name says what differs from the defaults of the day on which it was made."""
    found = document(FILES[0])
    asked, device = at_its_first_point(found), device_of(found)
    assert load(asked, device).pieces
    found["key"]["recipe"]["attention"] = "eager"
    monkeypatch.setattr("harness.formula.store._read", lambda path: Formula.from_json(found))
    assert not load(asked, device).pieces


@of_tested_releases(*MAKE_REQUESTS)
@pytest.mark.parametrize(
    "file", HELD_AGAINST_A_SIMULATION, ids=lambda file: file.name.removesuffix(".json.gz")
)
def test_it_says_what_a_simulation_says(file: Path) -> None:
    found = document(file)
    recipe, device = at_its_first_point(found), device_of(found)
    settings = parse_settings("", installed_version("torch") or "")
    simulated = simulate(recipe, device, settings, explain_oom=False)[0]
    told = Formula.from_json(found).profile(recipe, device, settings)
    assert (told.oom is None) == (simulated.oom is None)
    if simulated.oom is None:
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_phase"):
            assert getattr(told.memory, name) == getattr(simulated.memory, name), name
        if told.step.tokens_per_s is not None:
            # `fit` learns times of few layers: tests/fit/test_few_layers.py says how near they are
            assert told.step.tokens_per_s == pytest.approx(simulated.step.tokens_per_s, rel=1e-3)
    assert point_of(recipe) in [tuple(point) for piece in found["pieces"] for point in piece["points"]]
