"""Sharding against the ZeRO paper's numbers, the arithmetic of ring collectives, and a simulated rank."""

import subprocess
import sys
from dataclasses import replace

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.errors import InputError
from harness.fit import Simulations, divisions
from harness.fit.sharding import (
    GPUS_PER_NODE,
    Refused,
    Sharded,
    States,
    bucket_note,
    model_states,
    strategies,
    zero_buffers,
)
from harness.hardware.hardware import find_hardware, with_memory
from harness.hardware.table import Cited
from harness.napkin import Memory, estimate, step_time
from harness.recipe import Recipe, check_recipe, load_recipe
from harness.simulate.simulated_run import simulate
from harness.step_profile.in_words import peak_in_words
from harness.units import in_gib
from tests.support.tiny import tiny

MASTER = estimate(load_recipe("llama-2-7b-full-fp16-master")[1], find_hardware("a100-80gb"))
ADAM = States(2 * 7.5e9, 2 * 7.5e9, 12 * 7.5e9)


def shard(memory: Memory, gpus: int, group: int = GPUS_PER_NODE) -> list[Sharded]:
    """The strategies that the recipe can have, by the textbook."""
    rows = strategies(memory, gpus, group, by_arithmetic=True)
    return [row for row in rows if isinstance(row, Sharded)]


def test_table_1_of_the_zero_paper():
    """Rajbhandari et al., arXiv 1910.02054: 7.5 billion parameters, K = 12, GB a GPU by degree of data
    parallelism; that of 64 is its figure 1."""
    table = {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    }
    for gpus, row in table.items():
        for strategy, gigabytes in zip(("ZeRO-1", "ZeRO-2", "ZeRO-3"), row, strict=True):
            held = model_states(strategy, ADAM, gpus).total_bytes / 1e9
            assert held == pytest.approx(gigabytes, abs=0.06), (gpus, strategy)


def test_a_recipe_with_master_weights_has_the_papers_16_bytes_a_parameter():
    rows = {row.strategy: row for row in shard(MASTER, 64)}
    count = sum(w.elements * w.count for w in MASTER.trained)
    assert rows["DDP"].states.total_bytes / count == pytest.approx(16, rel=1e-6)
    assert rows["ZeRO-3"].states.total_bytes / count == pytest.approx(16 / 64, rel=1e-6)


def test_one_gpu_sends_nothing_and_holds_what_it_holds():
    for row in shard(MASTER, 1):
        assert row.sent_bytes == 0
        if row.strategy in ("ZeRO-1", "ZeRO-2"):
            assert row.peak_bytes == pytest.approx(MASTER.peak.total_bytes)


UNSYNCED = {"parallel": "ddp", "sync_each_micro_batch": False}
LLAMA_7B = 6_738_415_616
"""Parameters of Llama 2 7B (its checkpoint's own count); here all are trained, in fp16."""


def test_what_is_sent_to_the_byte_by_hand():
    """32 GPUs, groups of 8, 4 micro batches of 2 rows of 512 tokens. Ring: an all-gather or a reduce-scatter
    of M bytes over N GPUs sends M (N - 1) / N; an all-reduce is both (the paper's section 7)."""
    changes = ["gradient_accumulation_steps=4", "micro_batch_size=2", "seq_len=512"]
    memory = estimate(load_recipe("llama-2-7b-full-fp16-master", changes)[1], find_hardware("a100-80gb"))
    sent = {row.strategy: row.sent_bytes for row in shard(memory, 32)}
    whole = 2 * LLAMA_7B
    buffers = memory.parameter_bytes - whole  # rotary frequencies
    assert 0 <= buffers < 1024
    all_reduce = 31 / 32 * whole + 31 / 32 * whole
    assert sent["DDP"] == pytest.approx(4 * all_reduce, rel=1e-9)  # after every micro batch
    once = estimate(check_recipe(memory.recipe.model_dump() | UNSYNCED, "here"), memory.hardware)
    ddp = next(row for row in shard(once, 32) if row.strategy == "DDP")
    assert ddp.sent_bytes == pytest.approx(all_reduce, rel=1e-9)
    assert sent["ZeRO-1"] == sent["ZeRO-2"] == pytest.approx(all_reduce, rel=1e-9)
    # parameters gathered in forward and in backward of every micro batch, gradients scattered in each
    assert sent["ZeRO-3"] == pytest.approx(31 / 32 * (4 * 2 + 4) * whole, rel=1e-6)
    # FSDP2 does not gather again what no block has: embeddings, head and norm stay
    outer = 2 * (2 * 32000 * 4096 + 4096)
    once = 4 * (2 * whole - outer)
    assert sent["FSDP2"] == pytest.approx(31 / 32 * (once + 4 * whole), rel=1e-6)
    # the same within a group, and an all-reduce of an eighth of the gradients over four groups, every time
    across = 4 * 2 * 3 / 4 * whole / 8
    assert sent["hybrid sharding"] == pytest.approx(7 / 8 * (once + 4 * whole) + across, rel=1e-6)
    # a stream of 2 x 512 x 4096 values in fp16 over each border, forward and back
    assert sent["model parallel"] == 4 * 2 * (2 * 512 * 4096 * 2)


def test_deepspeeds_buffers_by_hand():
    """reduce_bucket_size, 5e8 elements of fp16, in every stage; in ZeRO-3 also stage3_max_live_parameters and
    stage3_prefetch_bucket_size, at most 1e9 + 5e7 of the 6.7e9 fp16 weights."""
    for strategy in ("ZeRO-1", "ZeRO-2"):
        (bucket,) = zero_buffers(MASTER, strategy)
        assert bucket.size_bytes == 500_000_000 * 2
    bucket, live = zero_buffers(MASTER, "ZeRO-3")
    assert (bucket.size_bytes, live.size_bytes) == (500_000_000 * 2, 1_050_000_000 * 2)
    assert zero_buffers(MASTER, "DDP") == []


def test_zero_3_at_its_peak_by_hand():
    """Its shares of the states, activations, and DeepSpeed's two buffers."""
    expected = 0.0
    for moment in MASTER.moments[1:]:
        step = moment.phase == "optimizer_step"
        held = moment.held
        own = held["activations"] + held["temporaries"] / (64 if step else 1)
        shares = (MASTER.parameter_bytes + 12 * LLAMA_7B + held["gradients"]) / 64
        expected = max(expected, shares + own + held["inputs"] + held["other"])
    rows = {row.strategy: row for row in shard(MASTER, 64)}
    assert rows["ZeRO-3"].peak_bytes == pytest.approx(expected + 1e9 + 2.1e9, rel=1e-6)
    assert "500,000,000 × 2 B" in rows["ZeRO-3"].buffers


def test_what_a_recipe_cannot_have_is_said_with_the_reason():
    memory = estimate(load_recipe("llama-3.1-70b-qlora")[1], find_hardware("h100"))
    refused = [row for row in strategies(memory, 2, by_arithmetic=True) if isinstance(row, Refused)]
    assert {row.strategy for row in refused} == {"tensor parallel", "FSDP2", "hybrid sharding"}
    assert all("bitsandbytes" in row.reason for row in refused)
    # the strategy stands before it, and where the values come from is no file
    for row, engine in zip(refused, ("tp", "fsdp", "fsdp"), strict=True):
        assert row.reason.startswith(f"parallel: {engine} with optimizer: ")


def test_tensor_parallelism_divides_layers_and_sums_the_stream_after_them():
    """Llama-3.1-8B in bf16 on 8 GPUs, one row of 2048 tokens. The residual stream is summed twice in the
    forward of a block, after attention and after the MLP, and twice in its backward (Megatron-LM, arXiv
    1909.08053, figure 4): 128 all-reduces, each a reduce-scatter and an all-gather."""
    memory = estimate(load_recipe("llama-3.1-8b-full-bf16")[1], find_hardware("h100"))
    row = {row.strategy: row for row in shard(memory, 8)}["tensor parallel"]
    assert row.sent_bytes == 4 * 32 * (2 * 7 / 8) * 2048 * 4096 * 2
    assert row.exposed_s == row.link_s
    assert row.states.parameters == pytest.approx(2 * 8_030_261_248 / 8, rel=1e-3)


def test_more_sharding_holds_less():
    for gpus in (2, 8, 64):
        rows = {row.strategy: row.peak_bytes for row in shard(MASTER, gpus)}
        assert rows["DDP"] > rows["ZeRO-1"] > rows["ZeRO-2"] > rows["ZeRO-3"]
    two, many = ({row.strategy: row.peak_bytes for row in shard(MASTER, n)} for n in (2, 64))
    assert all(many[name] <= two[name] for name in many)


def test_lora_sends_only_its_own_gradients_but_zero_3_gathers_the_frozen_base_too():
    memory = estimate(load_recipe("llama-3.1-8b-lora")[1], find_hardware("h100"))
    rows = {row.strategy: row for row in shard(memory, 8)}
    assert rows["DDP"].sent_bytes == pytest.approx(2 * memory.gradient_bytes * 7 / 8)
    assert rows["ZeRO-3"].sent_bytes > 2 * memory.parameter_bytes * 7 / 8


def test_every_row_says_what_overlaps_and_exposes_no_more_than_it_sends():
    for row in shard(MASTER, 16):
        assert row.overlap
        assert 0 <= row.exposed_s <= row.link_s


@pytest.mark.parametrize(("gpus", "group"), [(0, 8), (-1, 8), (12, 8), (4, 0)])
def test_counts_that_make_no_sense(gpus, group):
    with pytest.raises(InputError, match="gpus"):
        shard(MASTER, gpus, group)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_hide_under_the_last_backward_alone(micro_batches):
    """On a link so slow that sending takes far longer than computing."""
    slow = find_hardware("a100-80gb")
    link = Cited(1e8, "for this test alone")
    slow = replace(slow, datasheet=slow.datasheet._replace(gpu_link=link, host_link=link))
    changes = [f"gradient_accumulation_steps={micro_batches}"]
    memory = estimate(load_recipe("llama-2-7b-full-fp16-master", changes)[1], slow)
    phases = step_time(memory).phases
    one_backward_s = phases["backward"].seconds / micro_batches
    rows = {row.strategy: row for row in shard(memory, 8)}
    assert rows["ZeRO-2"].exposed_s == pytest.approx(rows["ZeRO-2"].link_s - one_backward_s)
    computing_s = phases["forward"].seconds + phases["backward"].seconds
    assert rows["ZeRO-3"].exposed_s == pytest.approx(rows["ZeRO-3"].link_s - computing_s)


# PyTorch's engines, simulated ------------------------------------------------------------------------

H100 = find_hardware("h100")
TINY = tiny(precision="bf16")
"""tests/models/llama.json: hidden size 64, 2 blocks, 4 heads and 2 of keys and values, 264 words."""
OF_FOUR = {
    "DDP": {"parallel": "ddp", "dp_replicate": 4},
    "FSDP2": {"parallel": "fsdp", "dp_shard": 4},
    "hybrid sharding": {"parallel": "fsdp", "dp_shard": 2, "dp_replicate": 2},
}


def asked(recipe: Recipe, gpus: int, group: int = 8) -> dict[str, Sharded | Refused]:
    """The rows by strategy."""
    return {row.strategy: row for row in strategies(estimate(recipe, H100), gpus, group)}


def test_pytorchs_engines_are_simulated_once_and_refused_for_good():
    """On four GPUs in groups of two; 2 heads cannot be divided among them, which transformers needs."""
    rows = asked(TINY, 4, 2)
    peaks: set[int] = set()
    exposed_s = 0.0
    for strategy, fields in OF_FOUR.items():
        profile = simulate(tiny(precision="bf16", **fields), H100)[0]
        row = rows[strategy]
        assert isinstance(row, Sharded)
        assert row.source == "simulated"
        assert row.peak_bytes == profile.memory.peak_allocated_bytes
        assert row.where == (profile.memory.peak_phase or "").replace("_", " ")
        waits = [phase.communication_s or 0 for phase in profile.phases.values()]
        assert row.exposed_s == pytest.approx(sum(waits), rel=1e-9)
        exposed_s += row.exposed_s
        assert row.fits
        assert row.tokens_per_s == pytest.approx(profile.step.tokens_per_s, rel=1e-9)
        peaks.add(row.peak_bytes)
    assert len(peaks) == 3
    assert exposed_s > 0  # of some: where the device waits for its host, collectives are over by then
    refused = rows["tensor parallel"]
    assert isinstance(refused, Refused)
    assert "4 does not divide the 2 num_key_value_heads" in refused.reason
    assert {rows[f"ZeRO-{stage}"].source for stage in (1, 2, 3)} == {"napkin"}
    # what was found is kept, a refusal too: another process needs no torch
    code = (
        "import json, sys\n"
        "from harness.fit.sharding import strategies\n"
        "from harness.hardware import find_hardware\n"
        "from harness.napkin import estimate\n"
        "from harness.recipe import Recipe\n"
        f"memory = estimate(Recipe(**json.loads({TINY.model_dump_json()!r})), find_hardware('h100'))\n"
        "print(repr(strategies(memory, 4, 2, print)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"{list(rows.values())!r}\n"


def test_what_fits_is_what_the_allocator_places_there_with_the_context():
    """Allocated the peak is less than the memory; what is reserved with the context is more."""
    profile = simulate(tiny(precision="bf16", **OF_FOUR["DDP"]), H100)[0]
    peak, reserved = profile.memory.peak_allocated_bytes, profile.memory.peak_reserved_bytes
    assert peak is not None
    assert reserved is not None
    context = H100.calibration.cuda_context_bytes
    for memory, fits in ((context + reserved, True), (context + peak, False)):
        found = divisions("tiny", TINY, with_memory(H100, memory), 4, 2)
        ddp = next(row for row in found.rows if row.strategy == "DDP")
        assert isinstance(ddp, Sharded)
        assert ddp.fits is fits
        (said,) = [line for line in str(found).splitlines() if line.startswith("does not fit in the ")]
        assert (" DDP," in said or said.endswith(" DDP")) is not fits
        assert max(map(len, str(found).split("\n\n")[1].splitlines())) <= 80


def test_ddp_holds_the_gradients_twice_and_one_bucket_cannot_hide():
    """107,840 parameters, under a MiB of gradients: one bucket, which is sent when backward has ended."""
    block = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    bucket = -(-2 * (2 * 264 * 64 + 64 + 2 * block) // 512) * 512
    rows = asked(TINY, 2)
    ddp = rows["DDP"]
    assert isinstance(ddp, Sharded)
    alone = simulate(TINY, H100)[0].memory.peak_allocated_bytes
    assert alone is not None
    assert ddp.peak_bytes == alone + bucket
    assert ddp.exposed_s >= ddp.link_s > ddp.sent_bytes / H100.datasheet.gpu_link.value
    assert in_gib(int(ddp.bucket_bytes)) in bucket_note(rows.values())
    # a group of all GPUs is FSDP2 itself; tensor parallelism divides 2 heads among 2
    fsdp, hybrid, tp = (rows[name] for name in ("FSDP2", "hybrid sharding", "tensor parallel"))
    assert isinstance(fsdp, Sharded)
    assert isinstance(hybrid, Sharded)
    assert isinstance(tp, Sharded)
    assert (hybrid.peak_bytes, hybrid.exposed_s) == (fsdp.peak_bytes, fsdp.exposed_s)
    assert (
        tp.peak_bytes
        == simulate(tiny(precision="bf16", parallel="tp", tp=2), H100)[0].memory.peak_allocated_bytes
    )


def test_a_divided_recipe_says_how_for_the_strategies_that_divide_it_so():
    fields = {"parallel": "fsdp", "dp_shard": 4, "reshard_after_forward": False, "reduce_dtype": "fp32"}
    recipe = tiny(precision="bf16", **fields)
    rows, others = asked(recipe, 2), asked(TINY, 2)
    on_two = recipe.model_copy(update={"dp_shard": 2})
    fsdp, other = rows["FSDP2"], others["FSDP2"]
    assert isinstance(fsdp, Sharded)
    assert isinstance(other, Sharded)
    assert fsdp.peak_bytes == simulate(on_two, H100)[0].memory.peak_allocated_bytes
    assert fsdp.peak_bytes > other.peak_bytes
    assert rows["ZeRO-2"] == others["ZeRO-2"]
    assert rows["DDP"] == others["DDP"]


def test_what_cannot_be_simulated_is_arithmetic_and_says_so():
    """In a process that is a rank already, of a size that nobody has simulated."""
    recipe = tiny(precision="bf16", micro_batch_size=3)
    by_arithmetic = {row.strategy: row for row in shard(estimate(recipe, H100), 2)}
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        rows = asked(recipe, 2)
    finally:
        distributed.destroy_process_group()
    for strategy in ("tensor parallel", *OF_FOUR):
        row = rows[strategy]
        assert isinstance(row, Sharded)
        assert row.source == "napkin"
        assert row.not_simulated.startswith("a rank of a run cannot simulate another")
        assert replace(row, not_simulated="") == by_arithmetic[strategy]


def test_what_leaves_the_gpu_is_told_on_the_host():
    """107,840 weights of 2 bytes and two moments of AdamW, half of them on each of two GPUs."""
    recipe = tiny(precision="bf16", parallel="fsdp", dp_shard=2, cpu_offload=True)
    found = divisions("tiny", recipe, H100, 2)
    (fsdp,) = [row for row in found.rows if isinstance(row, Sharded) and row.strategy == "FSDP2"]
    assert fsdp.states.gradients == fsdp.states.optimizer == 0
    assert fsdp.states.parameters < 107_840 * 2 / 2 / 10  # buffers, which FSDP2 leaves there
    assert fsdp.host_bytes >= 107_840 * (2 + 2 * 2) / 2
    said = f"{in_gib(int(fsdp.host_bytes))} a GPU in host memory"
    assert f"FSDP2 keeps {said}" in str(found)
    assert "DDP keeps" not in str(found)
    assert "does not fit in the 79.11 GiB of a GPU: none" in str(found)
    # a formula knows it at sizes that nobody simulated
    simulations = Simulations(H100)
    for seq_len in (64, 128, 256):
        simulations.simulated(recipe.model_copy(update={"seq_len": seq_len}))
    longer = simulations.expected(recipe.model_copy(update={"seq_len": 192}))
    assert longer is not None
    assert longer.memory.host_bytes == fsdp.host_bytes
    told = f"{in_gib(int(fsdp.host_bytes))} kept in host memory by each rank"
    assert told in peak_in_words(simulate(recipe, H100)[0])
