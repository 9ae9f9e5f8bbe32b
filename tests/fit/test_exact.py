"""The largest value that fits: it fits when simulated, and the next one does not."""

from __future__ import annotations

import json
from functools import cache

import pytest

from harness.errors import InputError
from harness.fit.exact import ExactFit, fit_exact
from harness.fit.search import FitField
from harness.fit.simulations import Simulations
from harness.hardware.hardware import Hardware, find_hardware, with_memory
from harness.recipe.recipe import Recipe
from harness.simulate.simulated_run import simulate
from tests.support.tiny import tiny

MiB = 2**20
A100 = find_hardware("a100-40gb")  # small cuBLAS workspaces, and flash attention in 16 bit
LORA = tiny(adapter="lora", precision="bf16", micro_batch_size=1, seq_len=1024)


def with_mib(mib: int) -> Hardware:
    """An A100 that has so much memory beside the CUDA context."""
    return with_memory(A100, A100.calibration.cuda_context_bytes + mib * MiB)


def fits(recipe: Recipe, mib: int) -> bool:
    return simulate(recipe, with_mib(mib), explain_oom=False)[0].oom is None


@cache
def found_in(mib: int, field: FitField = "micro_batch_size", unit: int = 1) -> ExactFit:
    """The largest value with so much memory beside the CUDA context."""
    return fit_exact(LORA, Simulations(with_mib(mib)), field, multiple_of=unit)


@pytest.mark.parametrize(("field", "unit"), [("micro_batch_size", 1), ("seq_len", 1024)])
def test_it_fits_and_the_next_one_does_not(field: FitField, unit: int) -> None:
    found = found_in(100, field, unit) if unit > 1 else found_in(100)
    assert found.value is not None
    assert found.value % unit == 0
    assert found.next_value == found.value + unit
    assert fits(LORA.model_copy(update={field: found.value}), 100)
    assert not fits(LORA.model_copy(update={field: found.next_value}), 100)
    assert found.profile is not None
    assert found.profile.recipe[field] == found.value
    assert (found.profile.memory.peak_reserved_bytes or 0) <= 100 * MiB
    assert found.next_profile is not None
    assert found.next_profile.oom is not None
    assert found.tried[found.value]
    assert not found.tried[found.next_value]
    assert len(found.tried) < 9  # not one by one


def test_a_recipe_that_is_too_large_as_it_is_shrinks() -> None:
    heavy = LORA.model_copy(update={"micro_batch_size": 8})
    told: dict[int, bool] = {}
    found = fit_exact(heavy, Simulations(with_mib(60)), told=told.__setitem__)
    assert found.value == found_in(60).value
    assert told == found.tried
    assert next(iter(told)) == 8  # it starts at what the recipe says


def test_when_nothing_fits_there_is_no_value() -> None:
    found = fit_exact(LORA, Simulations(with_mib(4)))
    assert (found.value, found.profile, found.next_value) == (None, None, 1)
    assert found.next_profile is not None
    assert found.next_profile.oom is not None


def test_a_limit_that_is_not_memory_is_named() -> None:
    found = fit_exact(tiny("gpt2", seq_len=128), Simulations(A100), "seq_len", multiple_of=128)
    assert (found.value, found.next_value) == (128, 256)  # tests/models/gpt2.json has 128 positions
    assert found.next_profile is None
    assert found.limit is not None
    assert "positions" in found.limit


def test_more_memory_fits_more() -> None:
    less, more = found_in(60).value, found_in(100).value
    assert less is not None
    assert more is not None
    assert less < more


def test_less_memory_than_the_context_takes_fits_nothing() -> None:
    assert fit_exact(LORA, Simulations(with_memory(A100, 5))).value is None


def test_json_has_what_was_found_and_tried() -> None:
    document = json.loads(json.dumps(found_in(60).as_json()))
    assert document["largest"] == found_in(60).value
    assert document["peak_reserved_bytes"] <= 60 * MiB
    assert document["next_out_of_memory_in"] in ("forward", "backward")
    assert document["tried"][str(document["next"])] is False
    nothing = fit_exact(LORA, Simulations(with_mib(4))).as_json()
    assert (nothing["largest"], nothing["peak_allocated_bytes"]) == (None, None)


def test_what_is_offloaded_is_said_as_it_is_simulated() -> None:
    recipe, device = LORA.model_copy(update={"offload": ("activations",)}), with_mib(60)
    found = fit_exact(recipe, Simulations(device))
    there = recipe.model_copy(update={"micro_batch_size": found.value})
    assert found.as_json()["host_bytes"] == simulate(there, device)[0].memory.host_bytes > 0
    assert found_in(60).as_json()["host_bytes"] is None


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(InputError, match="compile"):
        fit_exact(tiny(compile=True), Simulations(A100))
