"""What a step computes and moves: against a simulated step's operators, and Inductor's own count."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.causal_models.tiny import small_config
from harness.hardware.hardware import find_hardware
from harness.napkin import estimate, step_time
from harness.napkin.timing import COMPILED_PASSES, sent_byte_s
from harness.recipe import Recipe
from harness.simulate import simulate
from harness.step_profile import StepStats
from tests.support.tiny import cut, tiny

A100 = find_hardware("a100-80gb")
COUNTED = Path(__file__).parents[2] / "profiles" / "cpu" / "compiled_bytes.json"
ON_ATTENTION = {"adapter": "lora", "lora_targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("adapted", [{}, {"adapter": "lora"}, ON_ATTENTION], ids=["full", "all", "attention"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "pythia"])
def test_what_checkpointing_computes_again_ends_where_pytorch_stops(
    family: str, adapted: dict[str, Any]
) -> None:
    """Nothing behind the last product of a block keeps its result, unless a norm or an adapter does.
    An adapter's last product is not computed again either, which napkin does not tell apart: 1 % here."""
    if family == "pythia" and "lora_targets" in adapted:
        pytest.skip("its attention has one product for queries, keys and values")
    how = {"attention": "eager"} if family == "gemma2" else {}
    recipe = tiny(family, gradient_checkpointing=True, seq_len=256, **adapted, **how)
    again = step_time(estimate(recipe, A100)).recomputed_flops
    step = simulate(recipe, A100)[0].step
    assert step.hfu is not None
    assert step.mfu is not None
    assert step.time_s.median is not None
    recomputed = (step.hfu - step.mfu) * step.time_s.median * A100.peak_flops(recipe.compute_dtype)
    assert again == pytest.approx(recomputed, rel=0.015)


def mfu(step: StepStats) -> float:
    assert step.mfu is not None
    return step.mfu


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_an_mlp_in_tiles_is_computed_again_as_often_as_in_a_simulation(seq_len: int) -> None:
    """Tiles lower the peak for time: none of the work of whole MLPs goes, and their products come again."""
    base = Recipe(model="llama-3.2-1b", kernels="liger", seq_len=seq_len)
    whole, tiled = (base.model_copy(update={"mlp_tiles": tiles}) for tiles in (1, 4))
    simulated, by_arithmetic = (
        [mfu(step(recipe)) for recipe in (whole, tiled)]
        for step in (
            lambda recipe: simulate(recipe, A100)[0].step,
            lambda recipe: step_time(estimate(recipe, A100)).stats,
        )
    )
    assert by_arithmetic[1] / by_arithmetic[0] == pytest.approx(simulated[1] / simulated[0], rel=0.1)


def test_passes_over_what_a_compiled_block_keeps_are_those_that_inductor_counts() -> None:
    rows = json.loads(COUNTED.read_text())["rows"]
    assert len({row["model"] for row in rows}) == len(rows) >= 5
    for n, passes in enumerate(COMPILED_PASSES):
        assert passes == round(mean(row["passes"][n] for row in rows), 1)


def test_experts_in_4_bit_are_dequantized_in_forward_and_kept_for_backward() -> None:
    """Of each weight half a byte and its share of a maximum are read and two bytes written, once: so the
    simulated step moves bytes. Backward dequantizes linear layers alone again."""
    plain, four_bit = (
        tiny("mixtral", precision="bf16", quantization=each, **ON_ATTENTION) for each in ("none", "nf4")
    )
    experts, linear = 2 * 4 * 3 * 64 * 128, 2 * (2 * 64 * 64 + 2 * 32 * 64)
    moved, quantized = (simulate(recipe, A100)[0].phases for recipe in (plain, four_bit))
    added = {name: quantized[name].bytes_moved - moved[name].bytes_moved for name in moved}
    stored = 1 / 2 + 4 / 64
    assert added["forward"] == experts * (2 + stored) - linear * (2 - stored)  # read as they are stored
    assert added["backward"] < linear * (2 + stored)
    phases, before = (step_time(estimate(recipe, A100)).phases for recipe in (four_bit, plain))
    tokens = four_bit.tokens_per_step
    for name, made, copied in (
        ("forward", experts + linear, 2 * (64 + 32) * tokens),
        ("backward", linear, 0),
    ):
        dequantized = sum(work.before_bytes for work in phases[name].works)
        assert dequantized == pytest.approx((2 + stored) * made, rel=0.01)  # and a table each
        # peft copies the results of two layers in each of two blocks
        assert phases[name].bytes_moved == before[name].bytes_moved + dequantized + copied * 2 * 2


def test_llama_4_gives_every_token_to_every_expert(tmp_path: Path) -> None:
    """As Llama4TextMoe has it, whatever num_experts_per_tok says: a simulated step counts the same FLOPs."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config(CONFIG_MAPPING["llama4_text"]()) | {"moe_layers": [0, 1]}))
    recipe = tiny("llama", seq_len=256).model_copy(update={"model": str(path)})
    counted = simulate(recipe, A100)[0].phases["forward"].flops
    assert step_time(estimate(recipe, A100)).phases["forward"].flops == pytest.approx(counted, rel=0.02)


def test_gradients_are_projected_in_their_own_dtype() -> None:
    """An fp16 recipe runs on a T4, which has no bf16."""
    memory = estimate(tiny(precision="fp16", optimizer="galore_adamw"), find_hardware("t4"))
    assert {work.dtype for work in memory.optimizer.products} == {"fp16"}
    assert "optimizer_step" in step_time(memory).phases


def test_what_goes_through_the_hosts_memory_is_no_faster_than_pcie() -> None:
    """GeForce cards cannot read each other's memory: two of them gather through the host's, and a step that
    gathers its weights waits for it, as a simulated one does."""
    card = find_hardware("rtx-3090")
    assert sent_byte_s(card, range(2)) > 1 / card.datasheet.host_link.value
    recipe = Recipe(model="llama-3.2-1b", adapter="lora", seq_len=256, parallel="fsdp", dp_shard=2)
    simulated, by_arithmetic = simulate(recipe, card)[0].step, step_time(estimate(recipe, card))
    assert by_arithmetic.tokens_per_s == pytest.approx(simulated.tokens_per_s, rel=0.15)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss": "fused_linear"},
        {"adapter": "lora"},
        {"adapter": "lora", "quantization": "nf4", "lora_dropout": 0.1},
        {"precision": "fp16-mixed"},
        {"adapter": "lora", "parallel": "fsdp", "dp_shard": 2},
    ],
)
def test_casts_and_copies_move_the_bytes_that_a_simulated_step_counts(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """Those of embeddings, losses, adapters, 4-bit layers, autocast and FSDP2 are most of such a step's."""
    recipe = cut(Recipe(model="llama-3.2-1b", seq_len=1024, **fields), tmp_path, blocks=6)
    simulated, by_arithmetic = simulate(recipe, A100)[0].phases, step_time(estimate(recipe, A100)).phases
    for name in ("forward", "backward"):
        assert by_arithmetic[name].bytes_moved == pytest.approx(simulated[name].bytes_moved, rel=0.1)


@pytest.mark.parametrize(("model", "adapter"), [("qwen3-1.7b", "none"), ("llama-3.2-1b", "lora")])
def test_fsdp_makes_a_step_longer_by_as_much_as_a_simulated_step(
    model: str, adapter: str, tmp_path: Path
) -> None:
    """Short sequences wait for the host on an H100: sharding adds its hooks, and what is sent before all else
    or after it, which is half of the bytes of a model with so many words and few blocks."""
    alone = cut(Recipe(model=model, adapter=adapter, seq_len=128, micro_batch_size=1), tmp_path, blocks=6)
    sharded = alone.model_copy(update={"parallel": "fsdp", "dp_shard": 4})
    card = find_hardware("h100")
    took = [simulate(recipe, card)[0].phases for recipe in (alone, sharded)]
    found = [step_time(estimate(recipe, card)).phases for recipe in (alone, sharded)]
    for name in ("forward", "backward"):
        longer_s = (took[1][name].time_s.median or 0) - (took[0][name].time_s.median or 0)
        assert found[1][name].seconds - found[0][name].seconds == pytest.approx(longer_s, rel=0.1)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    ("model", "attention"),
    [("llama-3.2-1b", "eager"), ("qwen3-1.7b", "sdpa"), ("gpt2-medium", "sdpa"), ("phi-3-mini", "sdpa")],
)
def test_a_step_of_few_tokens_takes_as_long_as_its_host(
    model: str, attention: str, checkpointed: bool, tmp_path: Path
) -> None:
    """By its norms, positions, eager attention, and the hooks of checkpointing."""
    fields = {"seq_len": 64, "attention": attention, "gradient_checkpointing": checkpointed}
    recipe = cut(Recipe(model=model, micro_batch_size=1, **fields), tmp_path, blocks=8)
    card = find_hardware("h100")
    simulated, by_arithmetic = simulate(recipe, card)[0].phases, step_time(estimate(recipe, card)).phases
    for name in ("forward", "backward"):
        assert by_arithmetic[name].seconds == pytest.approx(simulated[name].time_s.median, rel=0.2)
