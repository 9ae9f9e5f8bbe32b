"""The overhead benchmark compares the same training. (What it measures is printed, not asserted.)"""

import pytest

from benchmarks.speed.overhead import WARMUP_ROUNDS, bare_loop, compare, harness_loop, paired
from tests.support.tiny import CPU, tiny

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
    turns = []
    found = compare(tiny(), CPU, rounds=6, before=turns.append)
    assert found["rounds"] == 6
    assert 0 < found["ratio_low"] <= found["ratio"] <= found["ratio_high"]
    assert found["harness_median_s"] > 0
    # who goes first alternates
    assert turns[:4] in (["harness", "bare", "bare", "harness"], ["bare", "harness", "harness", "bare"])
    assert turns.count("harness") == turns.count("bare") == 6 + WARMUP_ROUNDS


def test_a_ratio_by_hand():
    # two pairs each: 4/2, 6/2, 3/3; the fourth is left over
    found = paired([1, 3, 2, 4, 1, 2, 9], [1, 1, 1, 1, 2, 1, 9])
    assert found["ratio"] == 2.0
    assert (found["ratio_low"], found["ratio_high"]) == (1.0, 3.0)
    assert found["rounds"] == 6


def test_a_machine_that_gets_slower_does_not_change_the_ratio():
    speed = [1.0] * 20 + [3.0] * 20 + [0.5] * 2
    assert paired([1.25 * s for s in speed], speed)["ratio"] == 1.25
