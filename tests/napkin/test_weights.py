"""Bytes of parameters, gradients and optimizer state against the tensors of the built model."""

import pytest
import torch
from bitsandbytes import functional as bitsandbytes_functional
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear8bitLt

from harness.architecture.layers import Matrix, quantized
from harness.errors import InputError
from harness.hardware import find_hardware
from harness.napkin import estimate
from harness.observe.labels import tensors_in
from harness.recipe import Recipe, list_recipes, load_recipe
from harness.training.model import build_training
from tests.support.napkin_oracle import napkin, recipe_for
from tests.support.tiny import cut

CPU, META = torch.device("cpu"), torch.device("meta")
RECIPES = [name for name, _ in list_recipes()]


@pytest.fixture(autouse=True)
def _no_tables_of_another_device():
    """bitsandbytes caches its quantization tables on the first device it meets, meta included."""
    bitsandbytes_functional.name2qmap.clear()


def model_bytes(model) -> tuple[int, int]:
    """Bytes of all weights and buffers with their quantization state, and of the trained ones."""
    held = sum(b.nbytes for b in model.buffers())
    trained = 0
    for parameter in model.parameters():
        held += parameter.nbytes + state_bytes(getattr(parameter, "quant_state", None))
        trained += parameter.nbytes if parameter.requires_grad else 0
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            held += module.weight.SCB.nbytes
        for parametrization in getattr(module, "parametrizations", {}).values():
            held += sum(state_bytes(getattr(part, "quant_state", None)) for part in parametrization)
    return held, trained


def state_bytes(state: QuantState | None) -> int:
    if state is None:
        return 0
    nested = state_bytes(state.state2) + state.offset.nbytes if state.nested else 0
    return state.absmax.nbytes + state.code.nbytes + nested


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_built_on_meta(name, tmp_path):
    recipe = cut(load_recipe(name)[1], tmp_path, 4)
    sizes = napkin(recipe)
    held, trained = model_bytes(build_training(recipe, META).model)
    assert sizes.parameter_bytes == pytest.approx(held, rel=2e-4)
    assert sizes.gradient_bytes == pytest.approx(trained, rel=2e-4)


def test_there_are_recipes():
    assert len(RECIPES) >= 20


SETTINGS = [
    {"quantization": quantization, "double_quant": double_quant, "adapter": "lora", **more}
    for quantization in ("none", "nf4", "fp4", "int8")
    for double_quant in ((False, True) if quantization in ("nf4", "fp4") else (False,))
    for more in ({}, {"adapter_dtype": "base"}, {"precision": "fp16-mixed"})
]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda f: " ".join(str(v) for v in f.values()))
def test_every_quantization_really_built(tmp_path, fields):
    # odd sizes: blocks of 64 and of 256 x 64 values that are not full
    config = {"intermediate_size": 1016, "head_dim": 10, "vocab_size": 300}
    recipe = recipe_for(tmp_path, "llama", config=config, lora_rank=3, **fields)
    sizes = napkin(recipe)
    assert (sizes.parameter_bytes, sizes.gradient_bytes) == model_bytes(build_training(recipe, CPU).model)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi", "llama", "qwen3", "gemma2", "mixtral"])
def test_what_peft_adapts_for_ia3_and_for_a_list(tmp_path, family):
    targets = {"mixtral": ("q_proj", "v_proj")}.get(family, "all-linear")
    recipe = recipe_for(tmp_path, family, adapter="ia3", attention="eager", lora_targets=targets)
    trained = model_bytes(build_training(recipe, CPU).model)[1]
    assert napkin(recipe).gradient_bytes == trained


OPTIMIZERS = [
    *({"optimizer": name} for name in ("adamw", "adafactor", "sgd", "adamw_8bit", "lion_8bit", "muon")),
    {"optimizer": "muon", "adapter": "lora"},
    {"optimizer": "adamw_schedule_free"},
    {"optimizer": "adamw_torch_8bit"},
    {"optimizer": "adamw_torch_4bit", "precision": "bf16"},
    *({"optimizer": name, "optimizer_rank": 8} for name in ("galore_adamw", "apollo_adamw")),
    *(
        {"optimizer": name, "optimizer_rank": 8, "precision": "bf16"}
        for name in ("galore_adamw", "apollo_adamw")
    ),
    {"optimizer": "adamw", "master_weights": True},
    {"optimizer": "adamw", "precision": "fp16-mixed"},
    {"optimizer": "adamw", "adapter": "lora"},
]


@pytest.mark.parametrize("fields", OPTIMIZERS, ids=str)
def test_optimizer_state_is_that_of_the_stepped_optimizer(tmp_path, fields):
    recipe = recipe_for(tmp_path, "llama", **fields)
    if recipe.by_torchao:
        pytest.importorskip("torchao")
    if recipe.low_rank_optimizer:
        pytest.importorskip(f"{recipe.optimizer.partition('_')[0]}_torch")
    optimizer = build_training(recipe, CPU).optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        optimizer.step()
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = [
        {name: value for name, value in state.items() if name not in ("step", "scaled_grad")}
        for state in inner.state.values()
    ]
    found = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensors_in(kept)}
    tables = 2 * 1024 if recipe.optimizer.endswith("8bit") else 0
    assert sum(found.values()) - napkin(recipe).optimizer.state_bytes in range(tables + 1)


def test_mixed_precision_adam_takes_16_bytes_a_parameter():
    """Weights and gradients in 16 bit, and fp32 weights and two moments: 2 + 2 + 4 + 4 + 4 (arXiv 1910.02054,
    section 3.1)."""
    sizes = napkin(Recipe(model="llama-2-7b", master_weights=True))
    held = sizes.parameter_bytes + sizes.gradient_bytes + sizes.device_state
    assert held / 6_738_415_616 == pytest.approx(16, rel=1e-6)


def test_a_7b_model_is_28_gb_in_fp32_14_in_16_bit_and_3_5_in_4_bit():
    """arXiv 2305.14314: the constants of 4 bit are 0.5 bits a weight, 0.127 quantized themselves."""
    square = Matrix("q_proj", 4096, 4096, "in")
    for double_quant, bits in ((False, 4.5), (True, 4.127)):
        size, _ = quantized(square, "nf4", double_quant)
        assert 8 * size / square.elements == pytest.approx(bits, rel=1e-3)
    assert quantized(square, "int8", False)[0] == 4096 * 4096 + 4 * 4096


def test_paged_state_is_of_large_tensors_only(tmp_path):
    optimizer = napkin(recipe_for(tmp_path, "llama", optimizer="paged_adamw")).optimizer
    assert 0 == optimizer.paged_bytes < optimizer.state_bytes
    large = napkin(Recipe(model="llama-3.2-1b", optimizer="paged_adamw")).optimizer
    assert large.paged_bytes / large.state_bytes == pytest.approx(1, rel=1e-3)


def test_the_head_that_lora_may_adapt_is_the_one_of_the_task() -> None:
    rewarded = ("task=reward", "lora_targets=[score]")
    estimate(load_recipe("llama-3.1-8b-lora", rewarded)[1], find_hardware("h100"))
    _, of_words = load_recipe("llama-3.1-8b-lora", ("task=reward", "lora_targets=[lm_head]"))
    with pytest.raises(InputError, match="lm_head is no linear layer"):
        estimate(of_words, find_hardware("h100"))
