"""What an H100 and an H200 needed for full-size recipes, beside what simulation, a virtual GPU and napkin say
with its libraries."""

import json

import pytest

from harness.hardware import find_hardware
from pages.profiles.rows import read_rows
from tests.support.places import ROOT

CARDS = {"h100": 14, "h200": 27}
"""How many recipes were measured."""
ROWS = {f"{card}-{row.name}": row for card in CARDS for row in read_rows(ROOT / "profiles" / card)}
NEARLY = {
    "h200-llama-3.1-8b-qlora-seq-512": 2e-4,
    # what bitsandbytes keeps of columns with outliers depends on values, and these weights are random
    "h200-llama-3.1-8b-int8-lora": 0.11,
}
"""Those whose peaks are not simulated to the byte, and how far they are off at most."""
of_each = pytest.mark.parametrize("name", ROWS)


def test_the_recipes_have_every_answer_with_the_same_libraries() -> None:
    for card, number in CARDS.items():
        assert sum(name.startswith(card) for name in ROWS) == number
    for name, row in ROWS.items():
        assert set(row.profiles) == {"measured", "emulated", "napkin", "simulated"}
        sources = (
            ("measured", "emulated", "simulated") if name.startswith("h100") else ("measured", "simulated")
        )
        answers = [row.profiles[source] for source in sources]
        assert all(answer.recipe == row.ran.recipe for answer in answers)
        for library in ("torch", "transformers", "peft"):
            versions = {answer.provenance["versions"][library].partition("+")[0] for answer in answers}
            assert len(versions) == 1, (name, library)


@of_each
def test_the_simulation_has_pytorchs_counters_to_the_byte(name: str) -> None:
    row = ROWS[name]
    for what in ("peak allocated", "peak reserved"):
        simulated, measured = row.value("simulated", what), row.value("measured", what)
        if name in NEARLY:
            assert simulated == pytest.approx(measured, rel=NEARLY[name])
        else:
            assert simulated == measured
        if name.startswith("h100"):  # emulated with these libraries
            assert row.value("emulated", what) == measured


@of_each
def test_the_process_and_the_napkin_are_within_their_bars(name: str) -> None:
    row = ROWS[name]
    off = NEARLY.get(name, 0.0)
    assert row.ratio("simulated", "process") == pytest.approx(1, abs=0.03 + off)
    assert row.ratio("napkin", "peak allocated") == pytest.approx(1, abs=0.05 + off)


@pytest.mark.parametrize("card", CARDS)
def test_the_cards_calibration_is_what_was_measured(card: str) -> None:
    calibration = find_hardware(card).calibration
    folder = ROOT / "profiles" / card
    measured = json.loads((folder / "programme" / "calibrate.json").read_bytes())["results"]
    (launch,) = [each["result"] for each in measured if each["name"] == "launch"]
    assert calibration.cuda_context_bytes == launch["process_bytes"] - launch["reserved_bytes"]
    # what is not the card's, and what kernels are estimated by, stays as it is for other cards
    given = calibration.model_fields_set
    assert given == {"source", "host_link_fraction", "cuda_context_bytes"}


@pytest.mark.parametrize("card", CARDS)
def test_no_path_of_a_machine_is_in_the_profiles(card: str) -> None:
    for path in (ROOT / "profiles" / card).rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("/home/", "/tmp/", "/root/", "/work/") if word in text], path.name
