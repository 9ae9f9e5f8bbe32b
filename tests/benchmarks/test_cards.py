"""Recipes by card fit on their cards, and the guide's table is of simulations of today."""

import json

import pytest

from benchmarks.cards import OUT, cards_of, rows_of
from harness.recipe import list_card_recipes
from harness.system import installed_version
from tests.support.places import ROOT

FOUND = json.loads((ROOT / OUT).read_bytes())
LISTED = {recipe.name: recipe for recipe in list_card_recipes()}


def test_every_recipe_has_been_simulated_on_every_kind_of_card() -> None:
    asked = [(name, card.name) for name, one in LISTED.items() for card in cards_of(one.card_gb, "bf16")]
    assert [(row["recipe"], row["device"]) for row in FOUND["rows"]] == asked


def test_cards_of_one_size_are_of_every_architecture_and_the_smallest_of_each() -> None:
    assert {card.name for card in cards_of(24, "bf16")} == {"a10g", "l4"}
    assert [card.name for card in cards_of(16, "bf16")] == ["rtx-4070-ti-super", "rtx-5060-ti-16gb"]
    assert {card.name for card in cards_of(16, "fp16")} >= {"t4", "v100-16gb"}


@pytest.mark.parametrize("row", FOUND["rows"], ids=lambda row: f"{row['recipe']} {row['device']}")
def test_it_fits_with_something_to_spare(row) -> None:
    assert row["fits"]
    assert row["memory_bytes"] - row["process_bytes"] > 0.02 * row["memory_bytes"], "a display takes as much"


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_simulation_says_so_today(name: str) -> None:
    for library in ("torch", "transformers", "peft", "bitsandbytes"):
        installed = (installed_version(library) or "").partition("+")[0]
        if installed != FOUND["versions"][library].partition("+")[0]:
            pytest.skip("the table is of other releases")
    assert rows_of(name, LISTED[name].card_gb) == [row for row in FOUND["rows"] if row["recipe"] == name]
