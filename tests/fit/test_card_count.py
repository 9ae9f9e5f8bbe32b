"""How many cards: each number is napkin's own answer for the recipe on so many ranks."""

import pytest

from harness.errors import InputError
from harness.fit.card_count import among, compare_counts, read_counts, render_counts
from harness.hardware.hardware import find_hardware
from harness.napkin import estimate, step_time
from harness.recipe.file import load_recipe

FULL = load_recipe("llama-3.1-8b-full-bf16")[1]
COUNTS = [1, 2, 4, 8]
PRICES = {"h100": 2.5, "a100-40gb": 1.3, "rtx-4090": 0.4}


@pytest.fixture(scope="module")
def found():
    return compare_counts(FULL, COUNTS, PRICES)


def test_counts_are_read_in_order_and_once():
    assert read_counts("8,1, 2,8") == [1, 2, 8]
    assert read_counts("16") == [16]


@pytest.mark.parametrize("text", ["", "0", "1,0", "-2", "two", "1;2", "70000", "1.5", "9" * 5000])
def test_counts_that_are_none(text):
    with pytest.raises(InputError, match="--gpus"):
        read_counts(text)


def test_a_recipe_of_one_gpu_is_divided_by_fsdp2_and_a_divided_one_as_it_says():
    assert among(FULL, 1) == FULL
    divided = among(FULL, 4)
    assert (divided.parallel, divided.dp_shard) == ("fsdp", 4)
    ddp = load_recipe("llama-3.1-8b-lora", ["parallel=ddp"])[1]
    assert (among(ddp, 4).parallel, among(ddp, 4).dp_replicate) == ("ddp", 4)
    with pytest.raises(InputError, match=r"FSDP2 unless the recipe says parallel=ddp.*bitsandbytes"):
        among(load_recipe("llama-3.1-8b-qlora")[1], 2)
    with pytest.raises(InputError, match=r"dp_shard 8 = 8|mesh"):
        among(load_recipe("llama-3.1-8b-full-bf16", ["parallel=fsdp", "dp_shard=8"])[1], 6)


def test_what_a_card_needs_is_what_napkin_says_of_a_rank(found):
    for cards in found:
        device = find_hardware(cards.name)
        if cards.required_bytes is not None:
            rank = estimate(among(FULL, cards.gpus), device)
            assert cards.required_bytes == rank.required_bytes
            assert cards.fits == (rank.required_bytes <= device.memory_bytes)


def test_all_cards_together_do_and_cost_so_many_times_as_much(found):
    (cards,) = (c for c in found if c.gpus == 4 and c.name == "h100")
    recipe = among(FULL, 4)
    step_s = step_time(estimate(recipe, find_hardware("h100"))).seconds
    assert cards.tokens_per_s == pytest.approx(4 * recipe.tokens_per_step / step_s)
    assert cards.cost_per_million_tokens == pytest.approx(10 / (cards.tokens_per_s * 3600) * 1e6)
    document = cards.document()
    assert (document["all_price_per_hour"], document["price_per_hour"]) == (10, 2.5)
    assert document["all_tokens_per_s"] == cards.tokens_per_s
    small = next(c for c in found if c.gpus == 1 and c.name == "rtx-4090")
    assert small.document()["all_tokens_per_s"] is None
    assert small.cost_per_million_tokens is None


def test_so_many_tokens_take_hours_and_cost_what_the_hours_do(found):
    """By hand: 36 million tokens, at the speed of all cards, and the price of all by the hour."""
    (cards,) = (c for c in found if c.gpus == 4 and c.name == "h100")
    hours = 10_000 / cards.tokens_per_s
    document = cards.document(36_000_000)
    assert document["hours"] == pytest.approx(hours)
    assert document["cost"] == pytest.approx(hours * 10)
    assert "hours" not in cards.document()
    text = render_counts("full", [cards], 36_000_000)
    assert "36,000,000 tokens" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  4 × h100 ")]
    assert row.split()[-2:] == [f"{hours:,.1f}", f"{hours * 10:,.2f}"]
    small = next(c for c in found if c.gpus == 1 and c.name == "rtx-4090")
    assert small.document(36_000_000)["hours"] is None


def test_the_table_names_the_fewest_that_fit_the_smallest_and_the_cheapest(found):
    text = render_counts("full", found)
    assert "  1 × h100 " in text
    assert "  2 × a100-40gb" in text
    assert "  4 × rtx-4090" in text
    assert "the smallest: 1 ×" in text
    assert "none of these numbers fits: " in text
    (unable,) = [line for line in text.splitlines() if "cannot run it, no bf16 units" in line]
    assert "v100-32gb" in unable
    priced = [c for c in found if c.cost_per_million_tokens is not None]
    cheapest = min(priced, key=lambda c: c.cost_per_million_tokens or 0)
    assert f"with a price: {cheapest.gpus} × {cheapest.name}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_one_price_says_nothing_of_the_cheapest():
    found = compare_counts(FULL, [1, 2], {"h100": 2.5})
    assert "give prices of several" in render_counts("full", found)
    none = [c for c in found if not c.fits]
    assert "not even 2 cards of any device" in render_counts("full", none)
