"""What an H100 needed for full-size recipes, beside what simulation, a virtual GPU and napkin say with its
libraries."""

import json

import pytest

from harness.hardware import find_hardware
from pages.profiles.rows import Row, read_rows
from tests.support.places import ROOT

FOLDER = ROOT / "profiles" / "h100"
ROWS = {row.name: row for row in read_rows(FOLDER)}
of_each = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def test_fourteen_recipes_have_every_answer_with_the_same_libraries() -> None:
    assert len(ROWS) == 14
    for row in ROWS.values():
        assert set(row.profiles) == {"measured", "emulated", "napkin", "simulated"}
        answers = [row.profiles[name] for name in ("measured", "emulated", "simulated")]
        assert all(answer.recipe == row.ran.recipe for answer in answers)
        for library in ("torch", "transformers", "peft"):
            versions = {answer.provenance["versions"][library].partition("+")[0] for answer in answers}
            assert len(versions) == 1, (row.name, library)


@of_each
def test_the_simulation_and_the_virtual_gpu_have_pytorchs_counters_to_the_byte(row: Row) -> None:
    for what in ("peak allocated", "peak reserved"):
        for source in ("simulated", "emulated"):
            assert row.value(source, what) == row.value("measured", what)


@of_each
def test_the_process_and_the_napkin_are_within_their_bars(row: Row) -> None:
    assert row.ratio("simulated", "process") == pytest.approx(1, abs=0.03)
    assert row.ratio("napkin", "peak allocated") == pytest.approx(1, abs=0.05)


def test_the_cards_calibration_is_what_was_measured() -> None:
    calibration = find_hardware("h100").calibration
    measured = json.loads((FOLDER / "programme" / "calibrate.json").read_bytes())["results"]
    (launch,) = [each["result"] for each in measured if each["name"] == "launch"]
    assert calibration.cuda_context_bytes == launch["process_bytes"] - launch["reserved_bytes"]
    # what is not the card's, and what kernels are estimated by, stays as it is for other cards
    given = calibration.model_fields_set
    assert given == {"source", "host_link_fraction", "cuda_context_bytes"}


def test_no_path_of_a_machine_is_in_the_profiles() -> None:
    for path in FOLDER.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("/home/", "/tmp/", "/root/") if word in text], path.name
