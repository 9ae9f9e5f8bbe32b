"""What is kept for backward: by hand from papers, and as autograd saves it for small models of every kind."""

import json

import pytest

from harness.architecture.model_shape import ModelShape
from harness.hardware.hardware import find_hardware
from harness.napkin import Memory, derive_terms, estimate, predict
from harness.recipe import Recipe, load_recipe
from harness.simulate import simulate
from tests.support.long import but_for
from tests.support.napkin_oracle import CONFIGS, napkin, recipe_for, saved_bytes
from tests.support.places import ROOT
from tests.support.releases import keeps_workspaces

A100 = find_hardware("a100-80gb")
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
    gated=False,
    layer_norm=True,
    positions=2048,
    bias=True,
    attention_dropout=0.1,
    residual_dropout=0.1,
)


def kept(memory: Memory) -> int:
    """With autocast's copies of weights, which products keep."""
    sizes = memory
    return sizes.kept_by_blocks + sizes.kept_by_loss + sizes.weight_copies


@pytest.mark.parametrize(("batch", "seq"), [(1, 256), (2, 512), (4, 2048)])
def test_activations_of_a_gpt_layer_are_those_of_korthikanti_et_al(batch, seq):
    """arXiv 2205.05198, equation 1: s·b·h (34 + 5·a·s/h) bytes a layer in 16 bit, and table 2, with full
    recomputation: 2·s·b·h."""
    recipe = Recipe(model="gpt", micro_batch_size=batch, seq_len=seq, attention="eager")
    s, b, h, a = seq, batch, 1024, 16
    assert estimate(recipe, A100, GPT).kept == [(4, s * b * h * 34 + 5 * a * s * s * b, 0)]
    checkpointed = estimate(recipe.model_copy(update={"gradient_checkpointing": True}), A100, GPT)
    assert checkpointed.kept == [(4, 2 * s * b * h, s * b * h * 34 + 5 * a * s * s * b)]


def test_a_llama_block_by_hand():
    """bf16, every weight: each norm 4 + 2 + 2 bytes a hidden, q, k, v and the output 2 each, log-sum-exp 4
    a head, and in the MLP gate, up, their activation and product 2 each."""
    recipe = Recipe(model="llama-3.1-8b", precision="bf16", seq_len=2048)
    tokens, hidden, inner = 2048, 4096, 14_336
    attention = 2 * (2 * 32 + 2 * 8) * 128 + 4 * 32
    assert napkin(recipe).kept == [(32, tokens * (2 * 8 * hidden + attention + 4 * 2 * inner), 0)]


def test_logits_and_loss_take_two_four_four_and_four_bytes_a_token_and_word():
    memory = napkin(Recipe(model="llama-3.1-8b", adapter="lora", gradient_checkpointing=True))
    logits = 2048 * 128_256
    acts = memory.activations
    assert [t.size_bytes for t in acts.loss.at_end if t.formula.startswith("B·S·V")] == [
        2 * logits,
        4 * logits,
    ]
    assert 4 * logits in [t.size_bytes for t in acts.loss.kept]
    assert [t.size_bytes for t in acts.loss.in_backward] == [2 * 4 * logits]


def test_lora_in_fp32_keeps_a_copy_of_its_input_for_every_layer():
    """peft casts the input of each adapted layer to fp32: seven copies a block, of four tensors."""
    lora, base = (
        napkin(Recipe(model="llama-3.1-8b", adapter="lora", adapter_dtype=d)) for d in ("fp32", "base")
    )
    copies = 2048 * (4 * (3 + 1 + 2) * 4096 + 4 * 14_336) - 2048 * 2 * (2 * 4096 + 14_336)
    ranks = 2048 * 7 * 16 * 2  # A x in fp32, not in bf16
    assert lora.kept[0][1] - base.kept[0][1] == copies + ranks


WITHIN = {"gpt2": 0.2, "phi": 0.2, "phi3": 0.1, "gpt_neox": 0.1}
"""Families that copy more than the textbook says: GPT-2's GELU in Python, rotations of a part of a head."""


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_autograd_saves_about_as_much(tmp_path, family, adapter):
    targets = {"lora_targets": ("q_proj", "v_proj")} if family == "mixtral" and adapter == "lora" else {}
    recipe = recipe_for(tmp_path, family, attention="eager", adapter=adapter, **targets)
    assert kept(napkin(recipe)) == pytest.approx(saved_bytes(recipe), rel=WITHIN.get(family, 0.08))


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
def test_a_16_bit_base_is_cast_for_the_autocast_of_the_other_16_bits(adapter: str) -> None:
    recipe = Recipe(model="llama-3.2-1b", precision="fp16-mixed", adapter=adapter, seq_len=512)
    whole = simulate(recipe, A100)[0].memory.peak_allocated_bytes
    assert estimate(recipe, A100).peak.total_bytes == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_autograd_saves_about_as_much_in_other_precisions(tmp_path, precision):
    recipe = recipe_for(tmp_path, "llama", attention="eager", precision=precision)
    assert kept(napkin(recipe)) == pytest.approx(saved_bytes(recipe), rel=0.1)


COMPILED = {
    "llama": {"family": "llama"},
    "llama, eager": {"family": "llama", "attention": "eager"},
    "llama, lora": {"family": "llama", "adapter": "lora"},
    "llama, lora, dropout": {
        "family": "llama",
        "adapter": "lora",
        "adapter_dtype": "base",
        "lora_dropout": 0.1,
    },
    "gpt_neox": {"family": "gpt_neox"},
    "gpt2": {"family": "gpt2"},
    "phi3": {"family": "phi3"},
    "gemma2": {"family": "gemma2", "attention": "eager"},
    "mixtral": {
        "family": "mixtral",
        "config": {"hidden_size": 512, "intermediate_size": 2048},
        "seq_len": 256,
    },
}


@keeps_workspaces
@pytest.mark.parametrize("fields", but_for({"llama"}, COMPILED))
def test_a_compiled_model_keeps_about_as_much(tmp_path, fields):
    fields = {"attention": "sdpa", "compile": True} | fields
    recipe = recipe_for(tmp_path, fields.pop("family"), **fields)
    assert kept(napkin(recipe)) == pytest.approx(saved_bytes(recipe), rel=0.04)


@pytest.mark.parametrize("budget", but_for((), {str(n): n for n in (0.25, 0.5, 0.75)}))
def test_a_budget_is_what_a_compiled_model_keeps_at_most(tmp_path, budget):
    """The compiler keeps as much as the budget allows, whole tensors at a time."""
    recipe = recipe_for(tmp_path, "llama", attention="sdpa", compile=True, activation_memory_budget=budget)
    found = napkin(recipe)
    assert 0.75 < saved_bytes(recipe) / (found.kept_by_blocks + found.kept_by_loss) < 1.02


@keeps_workspaces
def test_the_peaks_of_compiled_models_are_about_those_of_pytorch_on_a_virtual_gpu(tmp_path):
    """Those of Inductor's code and PyTorch's allocator, every weight trained, in the committed file."""
    document = json.loads((ROOT / "profiles" / "cpu" / "virtual_gpu_compiled.json").read_text())
    for row in document["rows"]:
        config = json.loads((ROOT / "recipes" / "models" / f"{row['model']}.json").read_text())
        layers = {"num_hidden_layers": row["layers"]}
        if "layer_types" in config:
            layers["layer_types"] = config["layer_types"][: row["layers"]]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | layers))
        capped = {"attention": "eager"} if row["model"].startswith("gemma-2") else {}
        recipe = load_recipe("llama-3.2-1b-bf16")[1].model_copy(
            update={"model": str(path), "compile": True, **capped}
        )
        peak_bytes = predict(recipe, find_hardware(row["gpu"])).memory.peak_allocated_bytes
        assert peak_bytes == pytest.approx(row["compiled"]["peak_allocated_bytes"], rel=0.01)


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b-lora", "gemma-2-2b-lora", "mixtral-qlora", "llama-3.1-8b-full-bf16"]
)
def test_the_terms_of_a_section_add_up(name):
    memory = estimate(load_recipe(name)[1], A100)
    sums: dict[str, int] = {}
    for term in derive_terms(memory):
        sums[term.section] = sums.get(term.section, 0) + term.size_bytes
    sizes = memory
    assert sums["Parameters"] == sizes.parameter_bytes
    assert sums["Gradients"] == sizes.gradient_bytes
    assert sums["Kept for backward by the loss"] == sizes.kept_by_loss
    assert sums["Kept for backward"] == sizes.kept_by_blocks
    again = [size for section, size in sums.items() if section.startswith("One block")]
    assert again == [again for _, _, again in sizes.kept]
