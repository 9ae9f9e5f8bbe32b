"""quantization, double_quant and upcast_for_kbit: which weights are stored how, by name and dtype."""

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from harness.errors import InputError
from harness.observe.labels import model_tensors
from harness.parallel import DTYPES
from harness.recipe.recipe import Recipe
from harness.training.model import build_model
from tests.support.tiny import CPU, MODELS, ByteObserver, built, tiny, train, weights
from tests.training.toggles.test_adapter import BLOCKS, LLAMA, TARGETS

LINEAR = TARGETS | {"mixtral": LLAMA[:4]}  # its experts are no linear layers
FAMILIES = list(LINEAR)
BITS = {"nf4": 4, "fp4": 4, "int8": 8}


def quantized_recipe(family: str, quantization: str, **fields: Any) -> Recipe:
    defaults = {"precision": "bf16", "adapter": "lora", "lora_targets": [LINEAR[family][0].split(".")[-1]]}
    attention = "eager" if family == "gemma2" else "sdpa"
    return tiny(family, quantization=quantization, **(defaults | {"attention": attention} | fields))


def base_of(recipe: Recipe) -> nn.Module:
    return build_model(recipe, CPU).get_base_model()


def stored(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtype of every weight of the base by the name it has without an adapter."""
    named = {name.replace(".base_layer", ""): p.dtype for name, p in model.named_parameters()}
    return {name: dtype for name, dtype in named.items() if "lora_" not in name}


@pytest.mark.parametrize("weights_from", ["random", "pretrained"])
@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head(
    family: str, quantization: str, weights_from: str, tmp_path: Path
) -> None:
    recipe = quantized_recipe(family, quantization)
    if weights_from == "pretrained":
        recipe = pretrained(recipe, checkpoint(recipe, tmp_path))
    small = torch.int8 if quantization == "int8" else torch.uint8
    expected = {f"{BLOCKS[family]}.{i}.{name}.weight" for i in range(2) for name in LINEAR[family]}
    if family == "mixtral" and quantization != "int8":  # bitsandbytes has no 8 bit for expert weights
        experts = "model.layers.{}.mlp.experts.parametrizations.{}_proj.original"
        expected |= {experts.format(i, name) for i in range(2) for name in ("gate_up", "down")}
    dtypes = stored(base_of(recipe))
    assert {name for name, dtype in dtypes.items() if dtype == small} == expected
    assert {dtype for name, dtype in dtypes.items() if name not in expected} == {torch.bfloat16}


STORAGES: dict[str, dict[str, Any]] = {
    "none": {},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, doubly": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
"""What a script tells BitsAndBytesConfig."""


def recipe_stored(family: str, storage: str, **fields: Any) -> Recipe:
    quantization, _, doubly = storage.partition(", ")
    return quantized_recipe(family, quantization, double_quant=bool(doubly), **fields)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_what_transformers_loads(
    family: str, storage: str, precision: str, tmp_path: Path
) -> None:
    """Every bit of weights, scales and tables, and of the logits. But in 4 bit a mixture's experts, which
    transformers leaves in 16 bit, are what bitsandbytes makes of them."""
    recipe = recipe_stored(family, storage, precision=precision)
    folder, dtype = checkpoint(recipe, tmp_path), DTYPES[recipe.compute_dtype]
    how: dict[str, Any] = {"dtype": dtype}
    if told := STORAGES[storage]:
        how["quantization_config"] = BitsAndBytesConfig(**told, bnb_4bit_compute_dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, **how)
    ours = build_model(pretrained(recipe, folder), CPU)
    base: Any = ours.get_base_model()
    kept = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items()}
    for name, value in theirs.state_dict().items():
        if not (recipe.four_bit and ".mlp.experts." in name):
            assert torch.equal(kept[name], value), name
    kind = {"compress_statistics": recipe.double_quant, "quant_type": recipe.quantization}
    for name, module in base.named_modules():
        for parameter in getattr(module, "parametrizations", ()):
            weight = theirs.get_parameter(f"{name}.{parameter}")
            weight.data = dequantize_4bit(*quantize_4bit(weight.data, **kind)).view_as(weight)
            assert torch.equal(getattr(module, parameter), weight)
    input_ids = torch.arange(32).reshape(2, 16)
    assert torch.equal(ours.train()(input_ids).logits, theirs.train()(input_ids).logits)
    assert type(ours.get_output_embeddings()) is nn.Linear


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_stored_as_those_of_a_checkpoint(
    family: str, storage: str, tmp_path: Path
) -> None:
    recipe = recipe_stored(family, storage)
    made, loaded = (
        {
            # a quantization's settings are text, in which numbers are of several lengths
            name: (None if "quant_state" in name else value.shape, value.dtype)
            for name, value in base_of(each).state_dict().items()
        }
        for each in (recipe, pretrained(recipe, checkpoint(recipe, tmp_path)))
    )
    assert made == loaded


def test_the_labels_of_a_profile_see_the_scales() -> None:
    """Each byte of the model is some labelled tensor's: weights, buffers, scales and code tables."""
    for quantization in BITS:
        observer = ByteObserver()
        training, _ = built(quantized_recipe("mixtral", quantization, lora_targets=["q_proj"]), observer)
        seen = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in model_tensors(training.model)
        }
        assert sum(seen.values()) == observer.allocated_bytes, quantization


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_a_model_that_was_never_on_meta(family: str) -> None:
    """Not saved, not in a config: a rotary embedding's frequencies must be computed again."""
    quantized = dict(base_of(quantized_recipe(family, "nf4")).named_buffers())
    plain = dict(build_model(quantized_recipe(family, "none"), CPU).get_base_model().named_buffers())
    assert quantized.keys() == plain.keys()
    assert all(torch.equal(quantized[name], plain[name]) for name in plain)
    assert bool(plain) == (family != "gpt2")


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_the_configured_spread(family: str, quantization: str) -> None:
    """0.02 is transformers' default initializer_range; 4 bits in blocks of 64 keep the spread to a few %."""
    model = base_of(quantized_recipe(family, quantization))
    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    assert len(layers) == 2 * len(LINEAR[family])
    experts = [m for m in model.modules() if hasattr(m, "parametrizations")]
    assert len(experts) == (2 if family == "mixtral" and quantization != "int8" else 0)
    expert_weights = [getattr(module, name).float() for module in experts for name in module.parametrizations]
    for values in [*map(values_of, layers), *expert_weights]:
        assert values.std().item() == pytest.approx(0.02, rel=0.06)
        assert abs(values.mean().item()) < 0.002


def values_of(layer: Any) -> Tensor:
    """What a quantized layer's weight stands for, by bitsandbytes' own inverse or int8's definition."""
    if isinstance(layer, bnb.nn.Linear4bit):
        return dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    return layer.weight.CB.float() * layer.weight.SCB[:, None] / 127


@pytest.mark.parametrize(
    ("family", "quantization"),
    # int8 leaves a mixture's experts, nearly all of it, in 16 bit
    [(f, q) for f in FAMILIES for q in ("nf4", "int8") if (f, q) != ("mixtral", "int8")],
)
def test_building_holds_one_weight_in_16_bit(family: str, quantization: str, tmp_path: Path) -> None:
    """Twelve blocks: at its peak, setup holds what stays and the 16- and 32-bit values of one weight."""
    config = json.loads((MODELS / f"{family}.json").read_text())
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    (tmp_path / "config.json").write_text(json.dumps(config | {depth: 12}))
    recipe = quantized_recipe(family, quantization, model=str(tmp_path / "config.json"))
    observer = ByteObserver()
    with observer.phase("setup"):
        model = build_model(recipe, CPU)
    sizes = [p.numel() for p in build_model(without_quantization(recipe), CPU).parameters()]
    one_weight_bytes = (2 + 4) * max(sizes)
    assert 2 * sum(sizes) > observer.allocated_bytes + one_weight_bytes  # or this could not fail
    assert observer.peak_bytes["setup"] <= observer.allocated_bytes + one_weight_bytes
    assert model.training


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_upcast_for_kbit(quantization: str, precision: str) -> None:
    """Embedding, norms and head in fp32, as peft prepares them; the quantized layers as they were."""
    dtypes = stored(
        base_of(quantized_recipe("llama", quantization, precision=precision, upcast_for_kbit=True))
    )
    small = torch.int8 if quantization == "int8" else torch.uint8
    assert {name for name, dtype in dtypes.items() if dtype != small} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(
            f"model.layers.{i}.{norm}_layernorm.weight"
            for i in range(2)
            for norm in ("input", "post_attention")
        ),
    }
    assert set(dtypes.values()) == {small, torch.float32}


@pytest.mark.parametrize("fields", [{}, {"upcast_for_kbit": True, "gradient_checkpointing": True}])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_trains(family: str, quantization: str, fields: dict[str, Any]) -> None:
    recipe = quantized_recipe(family, quantization, **fields)
    start = built(recipe)[0]
    trained, losses = train(recipe, 2)
    before, after = weights(start), weights(trained)
    adapter = {name for name in before if "lora_" in name}
    assert {name for name in before if not torch.equal(before[name], after[name])} == adapter
    assert len(adapter) == 2 * 2
    assert all(loss == pytest.approx(5.576, abs=0.2) for loss in losses)  # ln 264: random weights


def test_a_name_without_weights_is_not_pretrained() -> None:
    recipe = Recipe(model="tiny-llama-bytes", weights="pretrained")
    with pytest.raises(InputError, match="tiny-llama-bytes is a config without weights"):
        build_model(recipe, CPU)


def without_quantization(recipe: Recipe) -> Recipe:
    return Recipe(**{**recipe.model_dump(), "quantization": "none", "adapter": "none"})


def checkpoint(recipe: Recipe, folder: Path) -> Path:
    """A checkpoint that transformers itself made and saved, with weights of its own."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(**json.loads(Path(recipe.model).read_text()))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def pretrained(recipe: Recipe, folder: Path) -> Recipe:
    return Recipe(**{**recipe.model_dump(), "model": str(folder), "weights": "pretrained"})


def test_flash_attention_takes_the_configs_dtype_and_not_that_of_quantized_weights():
    """k-bit preparation leaves fp32 queries, which transformers casts before a flash package sees them."""
    from transformers.integrations.flash_attention import get_target_dtype

    recipe = tiny(precision="bf16", quantization="nf4", adapter="lora", upcast_for_kbit=True)
    model = build_model(recipe, CPU)
    attention = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
    assert get_target_dtype(torch.empty(1, 1, 1, 16), attention) == torch.bfloat16
