"""Bytes of parameters, gradients and optimizer state against the tensors of the built model: equal."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional as bitsandbytes_functional
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear8bitLt

from harness.napkin.derivation.text import render
from harness.napkin.model.weights import quantized_bytes
from harness.napkin.prediction import profile
from harness.recipe.file import list_recipes, load_recipe
from harness.training.model import build_model, build_training
from harness.training.toggles.stepped_copy import SteppedCopy
from harness.training.warnings import surprises_of_model
from tests.support.napkin_oracle import napkin, recipe_for

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def _no_tables_of_another_device():
    """bitsandbytes caches its quantization tables on the first device it meets, meta included."""
    bitsandbytes_functional.name2qmap.clear()


RECIPES = [name for name, _ in list_recipes()]


def model_bytes(model) -> tuple[int, int, int]:
    """Bytes of all weights with their quantization state, of the trained ones, and of buffers."""
    weights = trained = 0
    for parameter in model.parameters():
        weights += parameter.nbytes + state_bytes(getattr(parameter, "quant_state", None))
        trained += parameter.nbytes if parameter.requires_grad else 0
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            weights += module.weight.SCB.nbytes
        for parametrization in getattr(module, "parametrizations", {}).values():
            weights += sum(state_bytes(getattr(part, "quant_state", None)) for part in parametrization)
    return weights, trained, sum(b.nbytes for b in model.buffers())


def state_bytes(state: QuantState | None) -> int:
    if state is None:
        return 0
    nested = state_bytes(state.state2) + state.offset.nbytes if state.nested else 0
    return state.absmax.nbytes + state.code.nbytes + nested


def optimizer_bytes(optimizer) -> int:
    """Bytes of distinct state tensors on the device (torch keeps step counters on the host)."""
    found = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and (name != "step"):
                found[value.untyped_storage()._cdata] = value.nbytes
    return sum(found.values())


def step_once(training) -> None:
    optimizer = training.optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_built_on_meta(name):
    recipe = load_recipe(name)[1]
    memory = napkin(recipe)
    model = build_training(recipe, META).model
    weights, trained, buffers = model_bytes(model)
    assert memory.sizes.parameter_bytes == weights + buffers
    assert memory.sizes.gradient_bytes == trained


def test_there_are_recipes():
    assert len(RECIPES) >= 20


SETTINGS = [
    {"quantization": quantization, "double_quant": double_quant, "adapter": adapter, **more}
    for quantization in ("none", "nf4", "fp4", "int8")
    for double_quant in ((False, True) if quantization in ("nf4", "fp4") else (False,))
    for adapter in ("lora", "ia3")
    for more in (
        {},
        {"adapter_dtype": "base"},
        {"precision": "fp16-mixed"},
        *(({"upcast_for_kbit": True},) if quantization != "none" else ()),
    )
    # peft's quantized IA3 layers return fp32, which a plain 16-bit model cannot take
    if adapter == "lora" or quantization == "none" or ("adapter_dtype" not in more and more)
]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda f: " ".join(str(v) for v in f.values()))
def test_every_quantization_and_adapter_really_built(tmp_path, fields):
    # odd sizes: blocks of 64 and of 256 x 64 values that are not full
    config = {"intermediate_size": 1016, "head_dim": 10, "vocab_size": 300}
    recipe = recipe_for(tmp_path, "llama", config=config, lora_rank=3, **fields)
    weights, trained, buffers = model_bytes(build_training(recipe, CPU).model)
    memory = napkin(recipe)
    assert memory.sizes.parameter_bytes == weights + buffers
    assert memory.sizes.gradient_bytes == trained


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi", "phi3", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_every_family_quantized_and_adapted(tmp_path, family, quantization):
    targets = {"lora_targets": ("q_proj", "v_proj")} if family == "mixtral" else {}
    fields = {"attention": "eager"} if family == "gemma2" else {}
    recipe = recipe_for(tmp_path, family, quantization=quantization, adapter="lora", **targets, **fields)
    weights, trained, buffers = model_bytes(build_training(recipe, CPU).model)
    memory = napkin(recipe)
    assert memory.sizes.parameter_bytes == weights + buffers
    assert memory.sizes.gradient_bytes == trained


OPTIMIZERS = [
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "optimizer_impl": "fused"},
    {"optimizer": "adafactor"},
    {"optimizer": "sgd"},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "lion_8bit"},
    {"optimizer": "adamw", "master_weights": True},
    {"optimizer": "adafactor", "master_weights": True},
    {"optimizer": "adamw", "precision": "fp16-mixed"},
    {"optimizer": "adamw", "adapter": "lora"},
]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("fields", OPTIMIZERS, ids=str)
def test_optimizer_state_is_that_of_the_stepped_optimizer(tmp_path, family, fields):
    targets = {"lora_targets": ("q_proj",)} if "adapter" in fields else {}
    recipe = recipe_for(tmp_path, family, **fields, **targets)
    training = build_training(recipe, CPU)
    step_once(training)
    optimizer = napkin(recipe).sizes.optimizer
    counters = 4 * sum(w.count for w in napkin(recipe).sizes.trained) if "optimizer_impl" in fields else 0
    assert optimizer.state_bytes - counters == optimizer_bytes(training.optimizer)
    copies = training.optimizer._copies if isinstance(training.optimizer, SteppedCopy) else []
    assert optimizer.copy_bytes == sum(copy.nbytes for copy in copies)


def test_paged_state_is_of_large_tensors_only(tmp_path):
    config = {"vocab_size": 2000, "num_hidden_layers": 1}
    for name, bytes_each in (("paged_adamw", 8), ("paged_adamw_8bit", 2)):
        recipe = recipe_for(tmp_path, "llama", config=config, optimizer=name)
        paged = napkin(recipe).sizes.optimizer.paged_bytes
        assert paged == 2 * 2000 * 64 * bytes_each, (
            "embeddings and head; no other tensor has 100,000 elements"
        )


# Textbook numbers -------------------------------------------------------------------------------


def test_a_7b_model_is_28_gb_in_fp32_14_in_16_bit_and_3_5_in_4_bit():
    gigabytes = {}
    for precision, quantization in (("fp32", "none"), ("bf16", "none"), ("bf16", "nf4")):
        overrides = [f"precision={precision}", f"quantization={quantization}", "adapter=lora", "lora_rank=1"]
        memory = napkin(load_recipe("llama-2-7b-full-fp16-master", ["master_weights=false", *overrides])[1])
        frozen = sum(w.total_bytes for w in [*memory.sizes.outer, *memory.sizes.in_blocks] if not w.trained)
        gigabytes[precision, quantization] = frozen / 1e9
    assert gigabytes["fp32", "none"] == pytest.approx(28, rel=0.05)
    assert gigabytes["bf16", "none"] == pytest.approx(14, rel=0.05)
    # 6.48 billion quantized at 1/2 byte + 4/64 of scales, and 2 x 131 million in 16 bit
    assert gigabytes["bf16", "nf4"] == pytest.approx(3.5, rel=0.20)
    assert quantized_bytes(7_000_000_000, "nf4", True) / 1e9 == pytest.approx(3.5, rel=0.04)


def test_mixed_precision_adam_takes_16_bytes_a_parameter():
    memory = napkin(load_recipe("llama-2-7b-full-fp16-master", [])[1])
    count = sum(w.elements * w.count for w in memory.sizes.trained)
    held = memory.sizes.parameter_bytes + memory.sizes.gradient_bytes + memory.sizes.optimizer.state_bytes
    assert (held + memory.sizes.optimizer.copy_bytes) / count == pytest.approx(16, rel=1e-6)


def test_rank_8_on_a_1024_square_trains_a_64th_of_it(tmp_path):
    config = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    recipe = recipe_for(
        tmp_path, "llama", config=config, adapter="lora", lora_rank=8, lora_targets=("q_proj",)
    )
    assert sum(w.elements for w in napkin(recipe).sizes.trained) * 64 == 1024 * 1024


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"quantization": "nf4"}),
        ("mixtral", {"quantization": "fp4", "lora_targets": ["q_proj"], "double_quant": True}),
        ("mixtral", {"quantization": "int8", "lora_targets": ["q_proj"]}),
        ("mixtral", {"quantization": "int8"}),
        ("mixtral", {"quantization": "int8", "lora_targets": ["q_proj"], "upcast_for_kbit": True}),
        ("mixtral", {}),
        ("llama", {"quantization": "nf4"}),
        ("gpt2", {"quantization": "int8"}),
    ],
    ids=str,
)
def test_what_quantization_leaves_is_said_as_of_the_built_model(tmp_path, family, fields):
    recipe = recipe_for(tmp_path, family, adapter="lora", **fields)
    estimated = napkin(recipe)
    warnings = profile(estimated).warnings
    assert warnings == surprises_of_model(recipe, build_model(recipe, CPU))
    assert bool(warnings) == (family == "mixtral" and recipe.quantized)
    told = " ".join(render("mine", estimated).split())
    assert [line in told for line in warnings] == [True] * len(warnings)
    assert told.count("warning:") == len(warnings)
