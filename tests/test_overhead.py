"""The overhead benchmark compares the same training. (What it measures is printed, not asserted.)"""

from __future__ import annotations

import pytest

from benchmarks.overhead import bare_loop, compare, harness_loop
from tests.tiny import CPU, tiny

RECIPES = {
    "accumulation and clipping": tiny(gradient_accumulation_steps=2, max_grad_norm=0.1),
    "fp16": tiny(precision="fp16-mixed", max_grad_norm=0.1),
    "master weights": tiny(precision="bf16", master_weights=True),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_both_loops_train_alike(recipe):
    ours, bare = harness_loop(recipe, CPU, rounds=4), bare_loop(recipe, CPU)
    losses = [(float(next(ours)), float(next(bare))) for _ in range(4)]
    assert losses[0][0] != losses[-1][0]
    assert all(mine == theirs for mine, theirs in losses)


def test_the_numbers_are_times():
    found = compare(tiny(), CPU, rounds=6)
    assert found["rounds"] == 6
    assert 0 < found["ratio_low"] <= found["ratio_high"]
    assert found["ratio"] == found["harness_median_s"] / found["bare_median_s"]
