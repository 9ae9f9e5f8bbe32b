"""Sharding against the ZeRO paper's numbers and the arithmetic of ring collectives."""

from __future__ import annotations

import pytest

from harness.errors import InputError
from harness.fit.sharding import STRATEGIES, States, model_states, shard
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import estimate
from harness.recipe.file import load_recipe

MASTER = estimate(load_recipe("llama-2-7b-full-fp16-master")[1], find_hardware("a100-80gb"))
ADAM = States(2 * 7.5e9, 2 * 7.5e9, 12 * 7.5e9)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("DDP", 120), ("ZeRO-1", 31.4), ("ZeRO-2", 16.6), ("ZeRO-3 / FSDP", 1.9)]
)
def test_figure_1_of_the_zero_paper(strategy, gigabytes):
    """Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 GPUs, K = 12."""
    assert model_states(strategy, ADAM, 64).total_bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_table_1_of_the_zero_paper():
    """Its table 1, 7.5 billion parameters: GB a GPU by degree of data parallelism."""
    table = {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    }
    for gpus, row in table.items():
        for strategy, gigabytes in zip(("ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP"), row, strict=True):
            held = model_states(strategy, ADAM, gpus).total_bytes / 1e9
            assert held == pytest.approx(gigabytes, abs=0.06), (gpus, strategy)


def test_hybrid_sharding_divides_within_a_group_only():
    assert model_states("hybrid sharding", ADAM, 64, group=8).total_bytes == ADAM.total_bytes / 8
    assert model_states("hybrid sharding", ADAM, 4, group=8).total_bytes == ADAM.total_bytes / 4


def test_a_recipe_with_master_weights_has_the_papers_16_bytes_a_parameter():
    rows = {row.strategy: row for row in shard(MASTER, 64)}
    count = sum(w.elements * w.count for w in MASTER.sizes.trained)
    assert rows["DDP"].states.total_bytes / count == pytest.approx(16, rel=1e-6)
    assert rows["ZeRO-3 / FSDP"].states.total_bytes / count == pytest.approx(16 / 64, rel=1e-6)


def test_all_reduce_is_reduce_scatter_and_all_gather():
    """The paper's section 7: DDP, ZeRO-1 and ZeRO-2 send 2Ψ elements, ZeRO-3 3Ψ: each times (N-1)/N."""
    rows = {row.strategy: row for row in shard(MASTER, 8)}
    psi_bytes = MASTER.sizes.gradient_bytes * 7 / 8
    assert rows["DDP"].sent_bytes == pytest.approx(2 * psi_bytes)
    assert rows["ZeRO-1"].sent_bytes == pytest.approx(2 * psi_bytes)
    assert rows["ZeRO-2"].sent_bytes == pytest.approx(2 * psi_bytes)
    assert rows["ZeRO-3 / FSDP"].sent_bytes == pytest.approx(3 * psi_bytes, rel=1e-6)


def test_one_gpu_sends_nothing_and_holds_what_it_holds():
    for row in shard(MASTER, 1):
        assert row.sent_bytes == 0
        if row.strategy in ("DDP", "ZeRO-1", "ZeRO-2"):
            assert row.peak_bytes == pytest.approx(MASTER.peak.total_bytes)


def test_more_sharding_holds_less():
    for gpus in (2, 8, 64):
        rows = {row.strategy: row.peak_bytes for row in shard(MASTER, gpus)}
        assert rows["DDP"] > rows["ZeRO-1"] > rows["ZeRO-2"] > rows["ZeRO-3 / FSDP"]
    two, many = ({row.strategy: row.peak_bytes for row in shard(MASTER, n)} for n in (2, 64))
    assert all(many[name] <= two[name] for name in STRATEGIES)


def test_lora_sends_only_its_own_gradients_but_zero_3_gathers_the_frozen_base_too():
    memory = estimate(load_recipe("llama-3.1-8b-lora")[1], find_hardware("h100"))
    rows = {row.strategy: row for row in shard(memory, 8)}
    assert rows["DDP"].sent_bytes == pytest.approx(2 * memory.sizes.gradient_bytes * 7 / 8)
    assert rows["ZeRO-3 / FSDP"].sent_bytes > 2 * memory.sizes.parameter_bytes * 7 / 8


def test_every_row_says_what_overlaps_and_exposes_no_more_than_it_sends():
    for row in shard(MASTER, 16):
        assert row.overlap
        assert 0 <= row.exposed_s <= row.link_s


@pytest.mark.parametrize(("gpus", "group"), [(0, 8), (-1, 8), (12, 8), (4, 0)])
def test_counts_that_make_no_sense(gpus, group):
    with pytest.raises(InputError, match="gpus"):
        shard(MASTER, gpus, group)
