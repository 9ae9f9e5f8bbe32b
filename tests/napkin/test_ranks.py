"""A rank's peak by arithmetic, against hand-written FSDP2 and DDP loops on PyTorch's own allocator.

The recordings are of benchmarks/virtual_gpu/rank_loops.py, which says how they are made.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.napkin.memory.moments import Memory
from harness.napkin.model.weights import Weight
from harness.napkin.prediction import estimate, predict
from harness.napkin.ranks.parts import described_mesh, part_of, whole_bytes
from harness.napkin.ranks.units import Unit, Units, as_computed
from harness.recipe.check import check_recipe
from tests.support.places import RECORDINGS, ROOT
from tests.support.tiny import tiny

RECORDED = [
    (path.stem, row)
    for path in sorted((RECORDINGS / "ranks").glob("*.json"))
    for row in json.loads(path.read_text())
]
LARGEST, MEDIAN = 0.08, 0.02
H100 = find_hardware("h100")


def named(case: dict[str, Any]) -> str:
    return " ".join(f"{value if name == 'model' else f'{name}={value}'}" for name, value in case.items())


def memory_of(case: dict[str, Any], folder: Path) -> Memory:
    fields = {"gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "lora_dropout": 0.0} | case
    config = json.loads((ROOT / "recipes" / "models" / f"{fields['model']}.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": fields.pop("layers")}))
    return estimate(check_recipe(fields | {"model": str(path)}, "case"), H100)


def by_phase(memory: Memory) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for moment in memory.moments[1:]:
        phase = "backward" if moment.phase == "loss" else moment.phase
        peaks[phase] = max(peaks.get(phase, 0), moment.total_bytes)
    return peaks


@pytest.mark.parametrize(
    ("ranks", "row"), RECORDED, ids=[f"{ranks} ranks: {named(row['case'])}" for ranks, row in RECORDED]
)
def test_every_phase_peaks_where_pytorchs_does(tmp_path, ranks, row):
    found = by_phase(memory_of(row["case"], tmp_path))
    for phase, measured in row["peaks"].items():
        assert found[phase] == pytest.approx(measured, rel=LARGEST), phase


def test_half_of_the_peaks_are_far_closer(tmp_path):
    off = [
        abs(memory_of(row["case"], tmp_path).peak.total_bytes / max(row["peaks"].values()) - 1)
        for _, row in RECORDED
    ]
    assert len(off) > 30
    assert median(off) < MEDIAN


# parts ------------------------------------------------------------------------------------------------


def test_a_part_is_the_first_dimension_divided_and_rounded_up():
    matrix = Weight("w", 10, 6, "fp32", 240, True, formula="10 * 6 * 4")
    assert part_of(matrix, 4).formula == "10 * 6 * 4 / 4"  # the row of a derivation
    assert (part_of(matrix, 4).rows, part_of(matrix, 4).size_bytes) == (3, 3 * 6 * 4)
    assert whole_bytes(matrix, 4, None) == 12 * 6 * 4
    assert whole_bytes(matrix, 4, "bf16") == 12 * 6 * 2
    vector = Weight("v", 1, 10, "bf16", 20, True, matrix=False)
    assert (part_of(vector, 4).elements, whole_bytes(vector, 4, None)) == (3, 24)
    experts = Weight("e", 24, 5, "bf16", 240, True, stacked=3)
    assert part_of(experts, 2).elements == 2 * 8 * 5
    assert part_of(matrix, 1) == matrix


def test_scales_of_packed_weights_are_whole_on_every_rank():
    packed, scales = 4096 // 2, 4096 // 64 * 4 + 64
    weight = Weight("w", 64, 64, "nf4", packed + scales, False, formula="half a byte and scales")
    assert part_of(weight, 4).formula == "half a byte and scales, the packed half byte / 4"
    assert part_of(weight, 4).size_bytes == packed // 4 + scales
    assert whole_bytes(weight, 4, "bf16") == packed
    uneven = Weight("w", 3, 64, "nf4", 96, False)  # 48 elements of 16 bit on 5 ranks: 10 each, rounded up
    assert (part_of(uneven, 5).size_bytes, whole_bytes(uneven, 5, None)) == (20, 100)


def test_a_mesh_is_said_by_the_names_of_its_dimensions():
    assert described_mesh(tiny(parallel="fsdp", dp_shard=2)) == "2 ranks: dp_shard 2"
    hybrid = tiny(parallel="fsdp", dp_shard=2, dp_replicate=3)
    assert described_mesh(hybrid) == "6 ranks: dp_replicate 3 × dp_shard 2"


# units ------------------------------------------------------------------------------------------------

OUTER = [Weight("embed_tokens", 8, 4, "fp32", 128, True), Weight("lm_head", 8, 4, "fp32", 128, True)]
BLOCK = [Weight("q_proj", 4, 4, "fp32", 64, True, count=3)]


def units(outer: list[Weight] = OUTER, **fields: Any) -> Units:
    recipe = tiny(**{"parallel": "fsdp", "dp_shard": 2, "precision": "fp32", **fields})
    return Units(
        recipe, outer, BLOCK, tied=False, micro_batches=recipe.gradient_accumulation_steps, on_host=False
    )


def test_units_by_hand():
    """Three blocks of 16 fp32 weights, and 64 more outside, on two ranks."""
    found = units()
    assert found.block == Unit(weights=64, gradients=64, reduced=64, part=32, output=32)
    assert found.own == Unit(weights=256, gradients=256, reduced=256, part=128, output=128, last=128)
    assert found.in_block() == 256 + 64 + 64
    assert found.before_block() == 256 + 3 * 64
    assert found.in_backward(3) == 256 + 64  # the head's: the last block ahead
    assert found.in_backward(2) == found.in_backward(1) == 256 + 2 * 64
    assert found.in_backward(0) == 256 + 64  # nothing comes before the first
    assert [found.being_reduced(index) for index in (3, 2, 1, 0, -1)] == [0, 0, 64, 64, 64]
    assert found.while_reducing(found.own) == 256


def test_kept_units_stay_until_their_backward():
    found = units(reshard_after_forward=False)
    assert found.in_block() == found.at_loss() == 256 + 3 * 64 + 64
    assert [found.in_backward(index) for index in (3, 2, 1, 0)] == [256 + n * 64 for n in (3, 3, 2, 1)]


def test_a_head_apart_is_gathered_for_the_loss_and_reduced_before_the_blocks():
    found = units(wrap="accelerate")
    assert (found.own, found.embeddings.weights, found.tail.weights) == (Unit(), 128, 128)
    assert (found.embeddings.last, found.tail.last) == (128, 128)  # of the only weight of each
    assert found.in_block() == 2 * 64
    assert found.at_loss() == 2 * 128
    assert found.being_reduced(2) == 128
    assert found.in_backward(0) == 64 + 128  # the embeddings ahead


def test_mixed_precision_gathers_in_16_bit_and_holds_fp32():
    found = units(precision="bf16-mixed", reduce_dtype="fp32")
    assert found.block == Unit(weights=32, gradients=32, reduced=64, part=32, output=32)


@pytest.mark.parametrize("fields", [{"precision": "bf16-mixed"}, {"parallel": "fsdp", "dp_shard": 2}])
def test_without_fsdp2s_mixed_precision_a_model_computes_as_it_was_built(fields):
    built = estimate(tiny(**fields), H100).sizes.built
    assert as_computed(built) is built


def test_unsynced_micro_batches_hold_whole_gradients():
    unsynced = {"gradient_accumulation_steps": 4, "sync_each_micro_batch": False}
    found = units(**unsynced)
    assert found.accumulated == 256 + 3 * 64
    assert found.accumulates
    assert not units(**unsynced, precision="bf16-mixed", reduce_dtype="fp32").accumulates
    assert units(gradient_accumulation_steps=4).accumulated == 0
    frozen = [replace(weight, trained=False) for weight in OUTER]
    assert units(frozen, **unsynced).accumulates  # the blocks' are all there are
    assert found.left_by(found.block) == 32 - 64  # a part comes, and what had gathered goes


def test_parts_of_gradients_stay_where_there_were_none():
    assert units().left_by(units().block) == 32
    assert units(gradient_accumulation_steps=4).left_by(units().block) == 0  # added to the earlier ones'


def test_one_rank_gathers_without_a_buffer():
    assert units(dp_shard=1).in_block() == 256 + 64


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_blocks_whole_gradients_wait_for_their_reduction_beside_the_parts_of_earlier_ones(micro_batches):
    fields = {"gradient_accumulation_steps": micro_batches, "micro_batch_size": 1, "seq_len": 8}
    memory = estimate(tiny(parallel="fsdp", dp_shard=2, **fields), H100)
    (last,) = (m for m in memory.moments if m.where.startswith("block, ") and m.phase == "backward")
    two_norms, head = 2 * 64 * 4, 264 * 64 * 4  # the head's waits for the root's reduction
    assert memory.sizes.earlier_gradients == (memory.sizes.gradient_bytes if micro_batches > 1 else 0)
    whole = memory.sizes.units.block.gradients - two_norms + head
    assert last.gradients == memory.sizes.earlier_gradients + whole


# the answer -------------------------------------------------------------------------------------------


def test_more_ranks_need_less_each_and_never_less_than_the_whole_units():
    peaks = [estimate(tiny(parallel="fsdp", dp_shard=n), H100).peak.total_bytes for n in (1, 2, 4, 8)]
    assert peaks[1:] == sorted(peaks[1:], reverse=True)


def test_ddp_holds_one_more_copy_of_the_gradients():
    alone, ddp = estimate(tiny(), H100), estimate(tiny(parallel="ddp", dp_replicate=2), H100)
    assert ddp.peak.total_bytes - alone.peak.total_bytes == ddp.sizes.bucket_bytes > 0
    assert predict(tiny(parallel="ddp", dp_replicate=2), H100).memory.peak_allocated_bytes


def test_offloaded_parts_leave_only_what_is_gathered():
    here = estimate(tiny(parallel="fsdp", dp_shard=2, max_grad_norm=None), H100)
    there = estimate(tiny(parallel="fsdp", dp_shard=2, max_grad_norm=None, cpu_offload=True), H100)
    assert there.peak.optimizer_state == 0
    assert there.peak.gathered_parameters > 0
    assert there.peak.total_bytes < here.peak.total_bytes
    held = here.sizes.parameter_bytes + here.sizes.gradient_bytes + here.sizes.device_state
    assert there.sizes.host_bytes >= held - here.sizes.parameter_bytes


def test_a_profile_of_a_rank_adds_up():
    profile = predict(tiny(parallel="fsdp", dp_shard=2), H100)
    at_peak = profile.memory.at_peak
    assert at_peak is not None
    assert at_peak.total_bytes() == profile.memory.peak_allocated_bytes
