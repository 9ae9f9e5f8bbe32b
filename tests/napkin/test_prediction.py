"""What napkin promises: every field priced, textbook numbers, monotone answers, floors, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.architecture.model_shape import ModelShape, load_shape
from harness.errors import InputError
from harness.hardware.hardware import all_hardware, find_hardware, hardware_names
from harness.napkin.derivation.activations import derive_terms
from harness.napkin.derivation.text import render
from harness.napkin.memory.moments import required_bytes
from harness.napkin.prediction import estimate, predict
from harness.napkin.timing import Timing
from harness.recipe.effects import EFFECTS
from harness.recipe.file import list_recipes, load_recipe
from harness.recipe.recipe import Recipe
from harness.step_profile.step_profile import StepProfile

H100 = find_hardware("h100")
A100 = find_hardware("a100-80gb")
RECIPES = [name for name, _ in list_recipes()]
SMALL = ModelShape(
    family="llama",
    vocab=32_000,
    hidden=1024,
    layers=8,
    heads=16,
    kv_heads=4,
    head_dim=64,
    intermediate=2816,
    tied=False,
    activation="silu",
    dtype="bf16",
    rotary_dim=64,
)


def small(**fields) -> Recipe:
    return Recipe(**{"model": "small", "seq_len": 512, **fields})


def answer(recipe: Recipe, shape: ModelShape = SMALL):
    """All that napkin says of a recipe, but for the recipe itself."""
    document = predict(recipe, H100, shape).model_dump()
    return {name: value for name, value in document.items() if name != "recipe"}


# Every field is priced, or neutral for a reason -------------------------------------------------

LORA = {"adapter": "lora"}
QLORA = {"adapter": "lora", "quantization": "nf4"}
DDP = {"parallel": "ddp"}
FSDP = {"parallel": "fsdp", "precision": "bf16-mixed", "reduce_dtype": "fp32", "dp_shard": 2}
PRICED = {
    "packing": ({}, True),
    "precision": ({}, "fp32"),
    "master_weights": ({}, True),
    "quantization": (LORA, "nf4"),
    "double_quant": (QLORA, True),
    "upcast_for_kbit": (QLORA, True),
    "adapter": ({}, "lora"),
    "lora_rank": (LORA, 64),
    "lora_dropout": (LORA, 0.1),
    "lora_targets": (LORA, ("q_proj",)),
    "adapter_dtype": (LORA, "base"),
    "gradient_checkpointing": ({}, True),
    "attention": ({}, "eager"),
    "loss": ({}, "fused_linear"),
    "optimizer": ({}, "adamw_8bit"),
    "optimizer_impl": ({}, "fused"),
    "optimizer_in_backward": ({}, True),
    "offload": ({}, ("activations",)),
    "compile": ({}, True),
    "micro_batch_size": ({}, 2),
    "gradient_accumulation_steps": ({}, 2),
    "seq_len": ({}, 1024),
    "max_grad_norm": ({}, 1.0),
    "weight_decay": ({}, 0.1),
    "parallel": ({}, "ddp"),
    "tp": ({"parallel": "tp"}, 2),
    "dp_replicate": (DDP, 4),
    "dp_shard": (FSDP, 4),
    "reshard_after_forward": (FSDP, False),
    "reduce_dtype": (FSDP, "bf16"),
    "sync_each_micro_batch": (FSDP | {"gradient_accumulation_steps": 2}, False),
    "wrap": (FSDP, "accelerate"),
    "cpu_offload": (FSDP, True),
}
ELSEWHERE = {
    "model": "its shape is given apart: test_monotone_in_layers",
}
OTHER_VALUES = {
    "weights": "pretrained",
    "trust_remote_code": True,
    "data": "some.jsonl",
    "lora_alpha": 8,
    "learning_rate": 1e-5,
    "warmup_steps": 7,
    "steps": 9,
    "seed": 1,
    "checkpoint_every": 5,
    "on_nan": "continue",
}


@pytest.mark.parametrize("field", Recipe.model_fields)
def test_a_recipe_field_is_priced_or_neutral_for_a_reason(field):
    assert (field in PRICED) + (field in EFFECTS) + (field in ELSEWHERE) == 1
    if field in PRICED:
        base, value = PRICED[field]
        assert answer(small(**base)) != answer(small(**base | {field: value}))
    if field in EFFECTS:
        assert len(EFFECTS[field].why) > 20
        base = LORA if field == "lora_alpha" else {}
        assert answer(small(**base)) == answer(small(**base, **{field: OTHER_VALUES[field]}))


CHOICES = {
    "precision": ["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"],
    "optimizer": ["adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw", "adafactor", "sgd", "lion_8bit"],
    "optimizer_impl": ["foreach", "fused", "for_loop"],
    "attention": ["eager", "sdpa"],
    "offload": [(), ("activations",), ("optimizer",), ("parameters",)],
    "quantization": ["none", "nf4", "int8"],
    "adapter": ["none", "lora", "ia3"],
}


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_every_value_of_a_choice_has_its_own_answer(field):
    base = {"quantization": LORA}.get(field, {})
    answers = [str(answer(small(**base, **{field: value}))) for value in CHOICES[field]]
    # fp16 is bf16 in bytes; GradScaler's scalars and unscaling tell them apart
    assert len(set(answers)) == len(answers)


# Textbook numbers -------------------------------------------------------------------------------


def test_mistral_7b_qlora_fits_16_gb_and_mixtral_8x7b_qlora_48():
    t4_sized = required_bytes(estimate(load_recipe("mistral-7b-qlora")[1], A100))
    assert t4_sized < 16e9
    assert required_bytes(estimate(load_recipe("mixtral-qlora")[1], A100)) < 48e9


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        # one more forward over forward and two of them back is a third; the last product is left out
        ("llama-3.1-8b-full-bf16", 1.20, 1.34),
        ("llama-3.2-1b-bf16", 1.20, 1.34),
        ("llama-2-7b-full-fp16-master", 1.20, 1.34),
        # a frozen base has half of the backward: one more over two
        ("qwen2.5-7b-lora", 1.33, 1.51),
    ],
)
def test_checkpointing_costs_20_to_33_percent_more_time(name, lowest, highest):
    seconds = []
    for on in ("true", "false"):
        recipe = load_recipe(name, [f"gradient_checkpointing={on}", "micro_batch_size=4"])[1]
        phases = Timing(estimate(recipe, A100).sizes).phases
        seconds.append(phases["forward"].seconds + phases["backward"].seconds)
    assert lowest <= seconds[0] / seconds[1] <= highest


GPT = ModelShape(
    family="gpt2",
    vocab=50_304,
    hidden=1024,
    layers=4,
    heads=16,
    kv_heads=16,
    head_dim=64,
    intermediate=4096,
    tied=True,
    activation="gelu",
    positions=2048,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    attention_dropout=0.1,
    residual_dropout=0.1,
    embedding_dropout=0.1,
)


@pytest.mark.parametrize(("batch", "seq"), [(1, 256), (2, 512), (4, 2048)])
def test_activations_of_a_gpt_layer_are_those_of_korthikanti_et_al(batch, seq):
    """arXiv 2205.05198, equation 1: s·b·h (34 + 5·a·s/h) bytes a layer in 16 bit. Its footnote leaves out
    the norms' statistics: two numbers of 4 bytes a token, for each of two norms."""
    recipe = small(micro_batch_size=batch, seq_len=seq, attention="eager")
    block = estimate(recipe, A100, GPT).sizes.stages.blocks[-1]
    s, b, h, a = seq, batch, 1024, 16
    assert block.kept == s * b * h * 34 + 5 * a * s * s * b + s * b * 2 * 2 * 4
    checkpointed = estimate(recipe.model_copy(update={"gradient_checkpointing": True}), A100, GPT)
    # table 2, full recomputation: 2·s·b·h
    assert checkpointed.sizes.stages.blocks[-1].kept_until_backward == 2 * s * b * h


def test_full_fine_tuning_in_bf16_with_foreach_adamw_peaks_at_five_times_the_weights():
    memory = estimate(load_recipe("llama-3.1-8b-full-bf16")[1], A100)
    weights = memory.sizes.parameter_bytes
    assert memory.peak.phase == "optimizer_step"
    assert memory.peak.total_bytes / weights == pytest.approx(5, rel=0.01)


def test_six_flops_a_parameter_and_token():
    """Kaplan et al., arXiv 2001.08361: forward and backward take 6 FLOPs for each weight of a product and
    token; attention adds 12·S·Q a layer and token (whole square, and scores computed once more)."""
    recipe = small(micro_batch_size=2)
    timing = Timing(estimate(recipe, A100, SMALL).sizes)
    tokens = 2 * 512
    weights = 8 * (1024 * (1024 + 256 + 256) + 1024 * 1024 + 3 * 1024 * 2816) + 1024 * 32_000
    attention = 8 * (4 + 10) * 512 * 1024 * tokens
    assert timing.model_flops == 6 * weights * tokens + attention


# Properties -------------------------------------------------------------------------------------

shapes = st.builds(
    lambda hidden, layers, groups, vocab, tied: replace(
        SMALL,
        hidden=64 * hidden,
        layers=layers,
        heads=hidden,
        kv_heads=hidden // groups if hidden % groups == 0 else hidden,
        intermediate=176 * hidden,
        vocab=vocab,
        tied=tied,
    ),
    st.integers(4, 48),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1000, 32_000, 128_256]),
    st.booleans(),
)
recipes = st.builds(
    lambda precision, adapter, checkpointing, attention, optimizer, rows, seq_len, steps: small(
        precision=precision,
        gradient_checkpointing=checkpointing,
        attention=attention,
        optimizer=optimizer,
        micro_batch_size=rows,
        seq_len=seq_len,
        gradient_accumulation_steps=steps,
        **adapter,
    ),
    st.sampled_from(["fp32", "bf16", "fp16", "bf16-mixed"]),
    st.sampled_from([{}, LORA, QLORA, {"adapter": "lora", "quantization": "nf4", "double_quant": True}]),
    st.booleans(),
    st.sampled_from(["eager", "sdpa"]),
    st.sampled_from(["adamw", "sgd", "adafactor", "adamw_8bit", "paged_adamw"]),
    st.integers(1, 8),
    st.sampled_from([128, 300, 512, 2048]),
    st.integers(1, 3),
)
few = settings(max_examples=40, deadline=None)


def peak(recipe: Recipe, shape: ModelShape) -> int:
    return estimate(recipe, H100, shape).peak.total_bytes


def changed(recipe: Recipe, **fields) -> Recipe:
    return Recipe(**{**recipe.model_dump(), **fields})


@few
@given(recipes, shapes)
def test_monotone_in_sequence_batch_and_rank(recipe, shape):
    now = peak(recipe, shape)
    assert peak(changed(recipe, seq_len=recipe.seq_len + 64), shape) >= now
    assert peak(changed(recipe, micro_batch_size=recipe.micro_batch_size + 1), shape) >= now
    if recipe.adapter == "lora":
        assert peak(changed(recipe, lora_rank=recipe.lora_rank + 8), shape) > now


@few
@given(recipes, shapes)
def test_monotone_in_layers(recipe, shape):
    assert peak(recipe, replace(shape, layers=shape.layers + 1)) > peak(recipe, shape)
    deeper = Timing(estimate(recipe, H100, replace(shape, layers=shape.layers + 1)).sizes).seconds
    assert deeper > Timing(estimate(recipe, H100, shape).sizes).seconds


@few
@given(recipes, shapes)
def test_lora_holds_less_than_full_and_qlora_less_than_lora(recipe, shape):
    assume(recipe.optimizer != "sgd")

    def held(**fields):
        sizes = estimate(changed(recipe, **fields), H100, shape).sizes
        state = sizes.optimizer.state_bytes + sizes.optimizer.paged_bytes
        return sizes.parameter_bytes + sizes.gradient_bytes + state

    plain = {"quantization": "none", "double_quant": False, "lora_rank": 4}
    full = held(**plain, adapter="none")
    lora = held(**plain, adapter="lora")
    assert lora < full
    assert held(**plain | {"quantization": "nf4"}, adapter="lora") < lora


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-7b", "tinyllama-1.1b", "qwen2.5-0.5b"])
def test_lora_peaks_below_full_and_qlora_below_lora(model):
    shape = load_shape(model)
    peaks = [
        peak(Recipe(model=model, gradient_checkpointing=True, **adapter), shape)
        for adapter in ({}, LORA, QLORA)
    ]
    assert peaks[0] > peaks[1] > peaks[2]


@few
@given(recipes, shapes)
def test_checkpointing_lowers_memory_and_raises_time(recipe, shape):
    shape = replace(shape, layers=max(shape.layers, 4))
    without, with_it = (changed(recipe, gradient_checkpointing=on) for on in (False, True))
    before, after = estimate(without, H100, shape), estimate(with_it, H100, shape)
    assert after.sizes.kept_in_forward < before.sizes.kept_in_forward
    # masks that eager attention adds stay until the blocks are computed again, and so does the first block's
    # input, of which a norm otherwise keeps a copy in fp32 alone
    block_input = (
        recipe.micro_batch_size * recipe.seq_len * shape.hidden * (2 if recipe.precision == "bf16" else 4)
    )
    assert after.peak.total_bytes <= before.peak.total_bytes + after.sizes.mask_bytes + block_input
    assert Timing(after.sizes).seconds > Timing(before.sizes).seconds
    assert Timing(after.sizes).model_flops <= Timing(after.sizes).hardware_flops


@few
@given(recipes, shapes, st.sampled_from(hardware_names()))
def test_no_phase_is_faster_than_the_datasheet(recipe, shape, name):
    device = find_hardware(name)
    dtype = recipe.compute_dtype
    assume(device.supports(dtype) and device.supports("bf16"))
    profile = predict(recipe, device, shape)
    for phase in profile.phases.values():
        # fp32 parts of a 16-bit step are slower than the 16-bit peak
        assert phase.time_s.median >= phase.flops / device.peak_flops(dtype) * (1 - 1e-9)
        assert phase.time_s.median >= phase.bytes_moved / device.memory_bandwidth * (1 - 1e-9)
    assert 0 < profile.step.mfu <= profile.step.hfu <= 1
    assert profile.step.time_s.median == pytest.approx(sum(p.time_s.median for p in profile.phases.values()))


@few
@given(recipes, shapes)
def test_the_breakdown_adds_up_to_the_peak_and_the_peak_is_the_largest_phase(recipe, shape):
    memory = predict(recipe, H100, shape).memory
    assert memory.at_peak.total_bytes() == memory.peak_allocated_bytes
    phases = predict(recipe, H100, shape).phases
    peaks = {name: p.peak_allocated_bytes for name, p in phases.items() if p.peak_allocated_bytes is not None}
    assert max(peaks.values()) == memory.peak_allocated_bytes
    assert peaks[memory.peak_phase] == memory.peak_allocated_bytes


# Answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_profile_and_a_derivation(name):
    recipe = load_recipe(name)[1]
    profile = predict(recipe, H100)
    assert StepProfile.from_json(profile.to_json()) == profile
    assert profile.source == "napkin"
    assert profile.memory.kind == "closed_form"
    unknowable = [profile.memory.peak_reserved_bytes, profile.memory.process_bytes, profile.step.loss]
    assert unknowable == [None, None, None]
    terms = derive_terms(estimate(recipe, H100))
    assert all(term.formula and term.source for term in terms)
    text = render(name, estimate(recipe, H100))
    assert all(term.name in text for term in terms)
    assert f"peak {profile.memory.peak_allocated_bytes / 2**30:.2f} GiB" in text


@pytest.mark.parametrize("name", RECIPES)
def test_the_terms_of_a_section_add_up(name):
    memory = estimate(load_recipe(name)[1], H100)
    sums: dict[str, int] = {}
    for term in derive_terms(memory):
        sums[term.section] = sums.get(term.section, 0) + term.size_bytes
    sizes = memory.sizes
    assert sums["Parameters"] == sizes.parameter_bytes
    assert sums["Gradients"] == sizes.gradient_bytes
    assert sums["Kept for backward by the loss"] == sizes.stages.loss.kept
    if "Kept for backward by one block" in sums:
        assert sums["Kept for backward by one block"] == sizes.stages.blocks[-1].kept
    assert sums["Kept for backward"] == sum(s.kept_until_backward * s.count for s in sizes.stages.blocks)


def test_a_line_can_be_redone_by_hand():
    recipe = load_recipe("llama-3.1-8b-full-bf16")[1]
    terms = {term.name: term for term in derive_terms(estimate(recipe, H100))}
    # 32 layers x (q and o 4096², k and v 1024·4096) x 2 bytes
    assert terms["attention projections, bf16"].size_bytes == 32 * (2 * 4096**2 + 2 * 1024 * 4096) * 2
    assert terms["log-probabilities"].formula.startswith("B·S·V × 4 B = 1·2,048·128,256 × 4 B")
    assert terms["log-probabilities"].size_bytes == 2048 * 128_256 * 4


def test_what_does_not_fit_says_so():
    recipe = load_recipe("llama-3.1-8b-full-bf16")[1]
    profile = predict(recipe, find_hardware("rtx-4090"))
    assert profile.oom is not None
    assert profile.oom.phase == profile.memory.peak_phase
    assert "DOES NOT FIT" in render("x", estimate(recipe, find_hardware("rtx-4090")))
    assert predict(recipe, H100).oom is None


def test_offload_moves_bytes_to_the_host_and_costs_time():
    for where in ("activations", "optimizer", "parameters"):
        base, moved = small(micro_batch_size=4), small(micro_batch_size=4, offload=(where,))
        before, after = predict(base, H100, SMALL), predict(moved, H100, SMALL)
        assert after.memory.host_bytes > before.memory.host_bytes == 0
        assert after.memory.peak_allocated_bytes < before.memory.peak_allocated_bytes
        assert after.step.time_s.median > before.step.time_s.median


@pytest.mark.parametrize(
    ("fields", "device", "words"),
    [
        ({"model": "gpt2-medium", "seq_len": 2048}, "h100", ["seq_len", "1024"]),
        ({"model": "gemma-2-2b"}, "h100", ["sdpa", "eager"]),
        ({"model": "llama-3.2-1b"}, "t4", ["t4", "bf16", "fp16"]),
        ({"model": "no-such-model"}, "h100", ["no-such-model"]),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(fields, device, words):
    with pytest.raises(InputError) as error:
        predict(Recipe(**fields), find_hardware(device))
    assert all(word in str(error.value) for word in words)


def test_every_device_answers():
    recipe = small(precision="fp16")
    seconds = {device.name: predict(recipe, device, SMALL).step.time_s.median for device in all_hardware()}
    assert seconds["h200"] < seconds["a100-80gb"] < seconds["t4"]


def test_the_command_needs_no_torch():
    """That it answers in 0.7 s is what benchmarks/speed/startup.py measures."""
    code = (
        "import sys\n"
        "from harness.cli.app import app\n"
        "app(['napkin', 'llama-3.1-70b-qlora', '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["source"] == "napkin"
