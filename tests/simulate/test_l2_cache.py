"""What the L2 cache holds, by the formula that was fitted to benchmarks and by hand."""

import math

import pytest
import torch

from harness.hardware import find_hardware
from harness.kernel_time import cache_room
from harness.kernel_time.estimates import memory_figures
from harness.kernel_time.memory_kernels import held_bytes
from harness.kernel_time.numbers import SCALARS
from harness.kernel_time.parameters import memory_of
from harness.recipe import Recipe
from harness.simulate import simulate
from harness.simulate.l2_cache import SMALLEST_BYTES, L2Cache, TouchedTensor, touched_tensors

MIB = 2**20
CARD = find_hardware("l40s")
ROOM = cache_room(CARD)


def touch(size_bytes: int, how: str) -> TouchedTensor:
    return TouchedTensor((), size_bytes, "r" in how, "w" in how)


@pytest.mark.parametrize("mib", [16, 40, 60, 80, 400])
def test_a_kernel_that_is_repeated_finds_what_was_fitted_to_benchmarks(mib: int) -> None:
    """Each time it reads one tensor and writes another, both of which it touched the time before."""
    cache, half = L2Cache(ROOM), mib * MIB // 2
    for _ in range(200):
        share = cache.held_share([(mib * MIB, touch(half, "r")), (mib * MIB, touch(half, "w"))])
    fitted = held_bytes(SCALARS, memory_figures(CARD), memory_of(CARD, "elementwise"), mib * MIB)
    assert share == pytest.approx(fitted / (mib * MIB), abs=1e-9)


def test_what_was_written_long_ago_is_read_from_memory() -> None:
    cache = L2Cache(ROOM)
    assert cache.held_share([(math.inf, touch(MIB, "r")), (MIB, touch(MIB, "w"))]) == 0.5
    assert cache.held_share([(ROOM.size_bytes, touch(MIB, "r")), (ROOM.size_bytes, touch(MIB, "w"))]) == 1


def test_results_evict_what_was_only_read_at_no_cost() -> None:
    """Weights that products have read need not be written back, as the results of others have to be."""
    after_weights, after_results = L2Cache(ROOM), L2Cache(ROOM)
    after_weights.held_share([(math.inf, touch(1000 * MIB, "r"))])
    after_results.held_share([(math.inf, touch(1000 * MIB, "w"))])
    fresh = [(math.inf, touch(MIB, "w"))]
    assert after_weights.held_share(fresh) == pytest.approx(1, abs=0.02)
    assert after_results.held_share(fresh) == pytest.approx(0, abs=1e-4)


def test_a_card_without_measurements_of_its_cache_holds_nothing() -> None:
    assert L2Cache(cache_room(find_hardware("v100-32gb"))).held_share([(MIB, touch(MIB, "r"))]) == 0


def test_what_an_operator_touches() -> None:
    """Small tensors, arguments of which a part is read, and results that are arguments are left out."""
    aten = torch.ops.aten
    large = torch.empty(SMALLEST_BYTES, dtype=torch.uint8, device="meta")
    small = large[:-1]
    added = touched_tensors(aten.add.Tensor, (large, small), {}, large.clone())
    assert added == [((0, 0), SMALLEST_BYTES, True, False), ((2,), SMALLEST_BYTES, False, True)]
    in_place = touched_tensors(aten.add_.Tensor, (large, large), {}, large)
    assert in_place == [((0, 0), SMALLEST_BYTES, True, True), ((0, 1), SMALLEST_BYTES, True, False)]
    many = touched_tensors(aten._foreach_mul_.Scalar, ([small, large], 2), {}, None)
    assert many == [((0, 0, 1), SMALLEST_BYTES, True, True)]
    table, tokens = torch.empty(1000, 1000, device="meta"), torch.empty(10, dtype=torch.long, device="meta")
    looked_up = touched_tensors(aten.embedding.default, (table, tokens), {}, table[:10])
    assert [path for path, *_ in looked_up] == [(2,)]


def test_a_larger_cache_makes_a_step_faster() -> None:
    """An L40S has 96 MiB of cache and an RTX A6000 6, at nearly the same bandwidth of its memory."""
    recipe = Recipe(model="tiny-llama-bytes", micro_batch_size=32, seq_len=512)
    spent = {}
    for name in ("l40s", "rtx-a6000"):
        hardware = find_hardware(name)
        phase = simulate(recipe, hardware, explain_oom=False)[0].phases["forward"]
        assert phase.kernels_s is not None
        spent[name] = phase.kernels_s["elementwise"] * hardware.memory_bandwidth / (phase.bytes_moved or 0)
    assert spent["l40s"] < 0.7 * spent["rtx-a6000"]
