"""Which devices a recipe fits, and what a change or a little memory makes of the answer."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from harness.fit.device_choice import compare_hardware, render_choice
from harness.fit.offers import estimated
from harness.hardware.hardware import find_hardware, with_memory
from harness.recipe import Recipe
from harness.simulate import simulate
from harness.step_profile import StepProfile
from tests.support.releases import keeps_workspaces
from tests.support.tiny import resized, tiny


def test_hours_and_cost_of_so_many_tokens_stand_in_the_table():
    offer = replace(
        estimated(tiny(precision="bf16"), find_hardware("h100", {"h100": 2.5})), tokens_per_s=1000.0
    )
    header, row = render_choice("tiny", [offer], tokens=36_000_000).splitlines()[2:4]
    assert header.split()[-2:] == ["hours", "cost"]
    assert row.split()[-2:] == ["10.0", "25.00"]
    assert max(len(header), len(row)) <= 80


def test_every_device_gets_what_a_simulation_on_it_says(tmp_path, monkeypatch):
    """Of those that run the same kernels one is simulated, with the clocks of all."""
    recipe = Recipe(model=resized(tmp_path, model_type="olmo2"), seq_len=256)
    names = ("t4", "l4", "l40s", "rtx-4090", "h100", "h200")
    devices = [find_hardware(name, {"l4": 0.7}) for name in names]
    devices.append(with_memory(find_hardware("a100-40gb"), 520 * 2**20))
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: devices)
    told: list[str] = []
    offers = {offer.name: offer for offer in compare_hardware(recipe, {"l4": 0.7}, told.append)}
    assert offers["t4"].reason == "no bf16 units"
    assert not offers["a100-40gb"].fits
    assert offers["a100-40gb"].reason.startswith("needs 0.")
    for device in devices[1:-1]:
        profile = simulate(recipe, device)[0]
        offer = offers[device.name]
        assert offer.fits
        assert offer.tokens_per_s == pytest.approx(profile.step.tokens_per_s, rel=1e-9)
        assert offer.required_bytes == pytest.approx(profile.memory.process_bytes, abs=2**21)
        busy = {kernel: seconds for kernel, seconds in offer.step_parts_s.items() if kernel != "idle"}
        assert busy == pytest.approx(profile.kernels_s(), rel=0.05)  # reductions: by multiprocessors
        assert sum(offer.step_parts_s.values()) == pytest.approx(offer.step_s)  # idle: a tiny step's host
    again: list[str] = []
    assert {o.name: o for o in compare_hardware(recipe, {"l4": 0.7}, again.append)} == offers
    assert not any("simulating" in line for line in again)  # what was found is kept


def test_a_change_that_costs_nothing_brings_a_smaller_device_in(tmp_path, monkeypatch):
    """Logits of 8,192 words are most of this step: without them it fits where it did not."""
    recipe = Recipe(model=resized(tmp_path, vocab_size=8192), seq_len=1024)
    h100 = find_hardware("h100")
    seen = [
        simulate(recipe.model_copy(update={"loss": loss}), h100)[0] for loss in ("fused_linear", "standard")
    ]
    needs = [profile.memory.process_bytes or 0 for profile in seen]
    slow, fast = (profile.step.tokens_per_s or 0 for profile in seen)
    assert needs[0] < needs[1]
    between = with_memory(h100, sum(needs) // 2)
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: [between])
    (offer,) = compare_hardware(recipe, {})
    assert (offer.fits, offer.overrides) == (True, "loss=fused_linear")
    assert offer.required_bytes == needs[0]
    assert fast / slow > 1.05  # of so small a model the logits are most
    cost = f"with which a token takes {fast / slow - 1:.0%} longer; it does not fit without"
    assert f"  * with loss=fused_linear, {cost}" in render_choice("tiny", [offer])
    cheap = render_choice("tiny", [replace(offer, slowdown=1.02)])
    assert "  * with loss=fused_linear, which costs next to nothing; it does not" in cheap


def test_what_barely_fits_is_too_tight_to_call_and_not_the_cheapest(tmp_path, monkeypatch):
    recipe = Recipe(model=resized(tmp_path), seq_len=256)
    needed = simulate(recipe, find_hardware("h100"))[0].memory.process_bytes
    assert needed is not None
    barely = with_memory(find_hardware("h100", {"h100": 1.0}), needed + 2**20)
    roomy = find_hardware("l4", {"l4": 1000.0})
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: [barely, roomy])
    offers = {offer.name: offer for offer in compare_hardware(recipe, {})}
    assert (offers["h100"].fits, offers["h100"].tight) == (True, True)
    assert not offers["l4"].tight
    text = render_choice("tiny", [offers["h100"], offers["l4"]])
    long = replace(
        offers["l4"], name="rtx-4070-ti-super", overrides="loss=fused_linear", memory_bytes=15 * 2**30
    )
    rows = render_choice("tiny", [offers["h100"], long]).splitlines()[3:5]
    assert [row[21:26] for row in rows] == ["  0.8", " 15.0"]
    assert "  h100? " in text
    assert "? too tight to call" in text
    assert "the fastest: l4" in text


@pytest.fixture
def small(tmp_path):
    """A recipe whose activations are most of what it needs."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_key_value_heads": 4}
    return Recipe(model=resized(tmp_path, **sizes), seq_len=4096, gradient_checkpointing=True)


def test_the_best_of_a_device_is_the_fastest_of_all_that_a_simulation_sees_to_fit(small, monkeypatch):
    """Every combination is simulated here, on a card that has room for all, and on one that has not and runs
    other kernels."""
    h100 = find_hardware("h100", {"h100": 2.0})

    devices = {"h100": h100}

    @cache
    def seen(name: str, checkpointing: bool, rows: int) -> StepProfile:
        fields = {"gradient_checkpointing": checkpointing, "micro_batch_size": rows}
        return simulate(small.model_copy(update=fields), devices[name], explain_oom=False)[0]

    without = seen("h100", False, 1).memory.process_bytes or 0
    devices["a100-80gb"] = with_memory(find_hardware("a100-80gb"), without - 2**26)
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: [*devices.values()])
    offers = {offer.name: offer for offer in compare_hardware(small, {}, best=True)}

    for name in devices:
        profiles = [seen(name, *each) for each in product((True, False), (1, 2, 4))]
        fastest = max(profile.step.tokens_per_s or 0 for profile in profiles if profile.oom is None)
        offer = offers[name]
        assert offer.fits
        assert 0.98 * fastest <= (offer.tokens_per_s or 0)
        assert offer.overrides in ("", "gradient_checkpointing=false")
        assert offer.micro_batch_size
        profile = seen(name, not offer.overrides, offer.micro_batch_size)
        assert profile.oom is None
        assert offer.tokens_per_s == pytest.approx(profile.step.tokens_per_s, rel=1e-9)
    assert offers["h100"].overrides == "gradient_checkpointing=false"
    assert offers["a100-80gb"].overrides == ""
    text = render_choice("small", [offers["h100"], offers["a100-80gb"]])
    assert f" {offers['h100'].micro_batch_size} a " in text
    assert "  a with gradient_checkpointing=false" in text
    table = text.partition("  rows:")[0].splitlines()
    assert max(map(len, table)) <= 80, text


@keeps_workspaces
def test_a_recipe_is_not_changed_for_a_speed_that_nobody_would_see(small, monkeypatch):
    """The loss of 264 words costs nothing; and where nothing fits, the least is what is said."""
    h100 = find_hardware("h100")
    fast = small.model_copy(update={"gradient_checkpointing": False, "micro_batch_size": 4})
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: [h100])
    (offer,) = compare_hardware(fast, {}, best=True)
    assert (offer.overrides, offer.micro_batch_size) == ("", 4)
    monkeypatch.setattr(
        "harness.fit.device_choice.all_hardware", lambda prices: [with_memory(h100, 858 * 2**20)]
    )
    (offer,) = compare_hardware(fast, {}, best=True)
    assert not offer.fits
    assert (offer.overrides, offer.micro_batch_size) == ("gradient_checkpointing=true", 1)
    least = simulate(small, h100)[0].memory.process_bytes
    assert offer.reason == f"needs {(least or 0) / 2**30:.1f} GiB"


@keeps_workspaces
def test_a_device_smaller_than_what_stays_is_not_simulated(tmp_path, monkeypatch):
    """Weights and optimizer states are the same whatever runs: two kinds of devices tell of the others."""
    config = {"vocab_size": 100_000_000, "tie_word_embeddings": True, "num_hidden_layers": 1}
    recipe = Recipe(model=resized(tmp_path, **config), seq_len=8)
    devices = [find_hardware(name) for name in ("rtx-3060", "l4", "h100", "b200", "a100-80gb", "a10g")]
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: devices)
    told: list[str] = []
    offers = {offer.name: offer for offer in compare_hardware(recipe, {}, told.append)}
    simulated = {line.removeprefix("simulating on ").partition(":")[0] for line in told}
    assert {"h100"} <= simulated <= {"b200", "a100-80gb", "h100"}  # some in processes that tell nobody
    assert [name for name, offer in offers.items() if offer.fits] == ["b200"]
    assert offers["h100"].reason.startswith("needs ")  # not kept out: its step does not fit
    weights = 2 * 64 * 100_000_000
    for name in ("rtx-3060", "l4", "a10g"):  # weights and two moments, and what a layer of 64 numbers adds
        kept = offers[name].required_bytes or 0
        assert offers[name].reason == f"{kept / 2**30:.1f} GiB stay on the device from step to step"
        assert kept == pytest.approx(3 * weights, rel=0.02)


def test_a_device_far_too_small_for_what_another_kind_needs_is_not_simulated(tmp_path, monkeypatch):
    """But with a change that costs nothing it is, where that may bring it in."""
    recipe = Recipe(model=resized(tmp_path, vocab_size=16_384), seq_len=4096)
    l4 = find_hardware("l4")
    changed = recipe.model_copy(update={"loss": "fused_linear"})
    with_it, without = (simulate(asked, l4)[0].memory.process_bytes or 0 for asked in (changed, recipe))
    assert with_it < without / 2
    small = [
        with_memory(l4, with_it + (without - with_it) // 4),
        with_memory(find_hardware("a10g"), with_it * 7 // 10),
    ]
    devices = [find_hardware("b200"), find_hardware("h100"), *small]
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: devices)
    told: list[str] = []
    offers = {offer.name: offer for offer in compare_hardware(recipe, {}, told.append)}
    assert (offers["l4"].fits, offers["l4"].overrides) == (True, "loss=fused_linear")
    assert offers["l4"].required_bytes == with_it
    needed = min(offers[name].required_bytes or 0 for name in ("b200", "h100"))
    assert offers["a10g"].reason == f"needs about {needed / 2**30:.1f} GiB"
    assert not any("a10g" in line for line in told)
