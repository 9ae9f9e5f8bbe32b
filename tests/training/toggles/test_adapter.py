"""adapter and its fields: what is trained, how it begins, and that merging it changes nothing."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING

from benchmarks.causal_models.tiny import small_config
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.training.model import build_model
from harness.training.toggles.optimizer import build_optimizer
from harness.training.warnings import surprises_of_model
from harness.units import in_gib
from tests.support.tiny import CPU, NullObserver, built, same_bits, step, tiny, train, weights

LLAMA = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LLAMA += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
TARGETS = {  # all-linear: every linear layer of a block; never the head
    "llama": LLAMA,
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "pythia": ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    "gemma2": LLAMA,
    "mixtral": [*LLAMA[:4], "mlp.gate", "mlp.experts", "mlp.experts.base_layer"],
}
BLOCKS = dict.fromkeys(TARGETS, "model.layers") | {"gpt2": "transformer.h", "pythia": "gpt_neox.layers"}


def lora(family: str = "llama", **fields: Any) -> Recipe:
    attention = "eager" if family == "gemma2" else "sdpa"
    return tiny(family, **{"adapter": "lora", "attention": attention, **fields})


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def adapted_modules(model: nn.Module) -> set[str]:
    """Modules with a trained weight, by the name they have in the base."""
    prefix = "base_model.model."
    return {name.removeprefix(prefix).split(".lora_")[0].split(".ia3_l")[0] for name in trained_names(model)}


def in_both_blocks(family: str, names: list[str]) -> set[str]:
    return {f"{BLOCKS[family]}.{i}.{name}" for i in range(2) for name in names}


@pytest.mark.parametrize("family", TARGETS)
def test_all_linear_layers_but_the_head(family: str) -> None:
    model = build_model(lora(family), CPU)
    assert adapted_modules(model) == in_both_blocks(family, TARGETS[family])
    assert all("lora_" in name for name in trained_names(model))


def test_all_linear_passes_by_experts_in_4_bit() -> None:
    """They are parameters behind a parametrization, which peft cannot adapt; what is linear is adapted."""
    recipe = lora("mixtral", quantization="nf4", precision="bf16")
    model = build_model(recipe, CPU)
    assert adapted_modules(model) == in_both_blocks("mixtral", [*LLAMA[:4], "mlp.gate"])
    stored, passed_by = surprises_of_model(recipe, model)
    elements = 2 * 3 * 4 * 64 * json.loads(Path(recipe.model).read_bytes())["intermediate_size"]
    assert f"16 bit: {in_gib(2 * elements)} instead of {in_gib(elements // 2)}" in stored
    assert passed_by.startswith("lora_targets: all-linear adapts the linear layers alone")


def test_experts_left_in_16_bit_are_said() -> None:
    """bitsandbytes has no 8 bit for them."""
    recipe = lora("mixtral", quantization="int8", precision="bf16", lora_targets=["q_proj"])
    (left,) = surprises_of_model(recipe, build_model(recipe, CPU))
    assert "bitsandbytes quantizes linear layers alone and leaves" in left
    assert "experts.down_proj, experts.gate_up_proj" in left
    for family, quantization in (("mixtral", "none"), ("llama", "nf4"), ("gpt2", "int8")):
        recipe = lora(family, quantization=quantization, precision="bf16", lora_targets="all-linear")
        assert surprises_of_model(recipe, build_model(recipe, CPU)) == []


TOLD: dict[str, Any] = {"task_type": "CAUSAL_LM"}
ALL = TOLD | {"target_modules": "all-linear"}
KEYS = {"lora_targets": ["k_proj", "v_proj"]}
METHODS: dict[str, tuple[dict[str, Any], PeftConfig]] = {
    "lora": ({}, LoraConfig(**ALL, r=16, lora_alpha=32)),
    "rank and alpha": ({"lora_rank": 4, "lora_alpha": 2.0}, LoraConfig(**ALL, r=4, lora_alpha=2)),
    "dropout": ({"lora_dropout": 0.5}, LoraConfig(**ALL, r=16, lora_alpha=32, lora_dropout=0.5)),
    "rslora": ({"use_rslora": True}, LoraConfig(**ALL, r=16, lora_alpha=32, use_rslora=True)),
    "dora": ({"use_dora": True}, LoraConfig(**ALL, r=16, lora_alpha=32, use_dora=True)),
    "ia3": ({"adapter": "ia3"}, IA3Config(**TOLD)),
    # all-linear, the field's default, would train a copy of every linear layer under LN_TUNING
    "LN_TUNING": ({"adapter": "peft", "peft": {"peft_type": "LN_TUNING"}}, LNTuningConfig(**TOLD)),
    "IA3": ({"adapter": "peft", "peft": {"peft_type": "IA3"}}, IA3Config(**TOLD)),
}
OF_EXPERTS: dict[str, tuple[dict[str, Any], PeftConfig]] = {
    "lora": METHODS["lora"],
    "ia3": (
        {"adapter": "ia3"} | KEYS,
        IA3Config(**TOLD, target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
    ),
}
CASES = {(family, name) for family in TARGETS for name in (OF_EXPERTS if family == "mixtral" else METHODS)}
CASES -= {("pythia", "LN_TUNING")}  # whose norms peft does not know


@pytest.mark.parametrize(("family", "name"), sorted(CASES))
def test_the_model_is_the_one_that_peft_makes_of_the_base(family: str, name: str) -> None:
    """By the same random numbers: its weights, what it computes once it is trained, and what is merged."""
    fields, config = (OF_EXPERTS if family == "mixtral" else METHODS)[name]
    ours = build_model(lora(family, **fields), CPU)
    base: Any = build_model(lora(family, adapter="none"), CPU)
    input_ids = torch.arange(32).reshape(2, 16)
    before = base.eval()(input_ids).logits
    theirs: Any = get_peft_model(base, copy.deepcopy(config))
    assert trained_names(ours) == trained_names(theirs)
    assert same_bits(ours.state_dict(), theirs.state_dict())
    if name != "dora":  # which divides by the lengths that it multiplies with
        assert torch.equal(ours.eval()(input_ids).logits, before)
    logits, merged = [], []
    for model in (ours, theirs):
        torch.manual_seed(1)
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, 1.0, 0.1)
        logits.append(model.train()(input_ids).logits)
        merged.append(dict(model.merge_and_unload().named_parameters()))
    assert torch.equal(*logits)
    assert not torch.allclose(logits[0], before)
    assert same_bits(*merged)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"]])
def test_listed_targets_and_no_others(targets: list[str]) -> None:
    model = build_model(lora(lora_targets=targets), CPU)
    names = [name for name in LLAMA if name.split(".")[1] in targets]
    assert adapted_modules(model) == in_both_blocks("llama", names)


@pytest.mark.parametrize(
    ("family", "fields", "missing"),
    [
        ("llama", {"lora_targets": ["q_proj", "gate_up"]}, "gate_up"),
        ("llama", {"lora_targets": ["query"]}, "query"),
        ("llama", {"adapter": "ia3", "lora_targets": ["q_proj", "nope"]}, "nope"),
        (
            "mixtral",
            {"quantization": "nf4", "precision": "bf16", "lora_targets": ["q_proj", "w1", "w2", "w3"]},
            "experts stored in 4 bit",
        ),
    ],
)
def test_a_target_that_adapts_nothing_is_refused(family: str, fields: dict[str, Any], missing: str) -> None:
    with pytest.raises(InputError, match=f"lora_targets: .*{missing}"):
        build_model(lora(family, **fields), CPU)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("fields", "base", "adapter"),
    [
        ({"precision": "fp32"}, "fp32", "fp32"),
        ({"precision": "bf16"}, "bf16", "fp32"),
        ({"precision": "bf16", "adapter_dtype": "base"}, "bf16", "bf16"),
        ({"precision": "fp16"}, "fp16", "fp32"),
        ({"precision": "fp16", "adapter_dtype": "base", "master_weights": True}, "fp16", "fp16"),
        ({"precision": "bf16-mixed", "quantization": "nf4"}, "bf16", "fp32"),
        ({"precision": "bf16-mixed", "quantization": "nf4", "adapter_dtype": "base"}, "bf16", "bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_dtypes(kind: str, fields: dict[str, Any], base: str, adapter: str) -> None:
    training, batches = built(lora(**{**fields, "adapter": kind}))
    model = training.model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {DTYPES[adapter]}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} - {torch.uint8} == {DTYPES[base]}
    gradients: set[torch.dtype | None] = set()

    def look() -> None:
        gradients.update(p.grad.dtype if p.grad is not None else None for p in model.parameters())

    step(training, batches, NullObserver(optimizer_step=look))
    assert gradients == {DTYPES[adapter], None}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_ia3_on_a_quantized_base_is_fp32_around_it(quantization: str, precision: str) -> None:
    fields = {"adapter": "ia3", "quantization": quantization, "precision": precision}
    _, losses = train(lora(**fields, upcast_for_kbit=True), 2)
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("fields", [{}, {"max_grad_norm": 1.0, "gradient_checkpointing": True}])
@pytest.mark.parametrize("adapter", ["lora", "ia3"])
@pytest.mark.parametrize("family", TARGETS)
def test_every_adapter_weight_trains_and_no_other(family: str, adapter: str, fields: dict[str, Any]) -> None:
    if (family, adapter) == ("mixtral", "ia3"):
        fields = fields | {"lora_targets": ["k_proj", "v_proj"]}  # peft's own choice names no layer of it
    recipe = lora(family, adapter=adapter, **fields)
    start = weights(built(recipe)[0])
    after = weights(train(recipe, 2).training)
    moved = {name for name in start if not torch.equal(start[name], after[name])}
    assert moved == set(trained_names(built(recipe)[0].model))
    assert len(moved) >= 2


def test_the_seed_decides_the_weights_and_the_dropout() -> None:
    fields = {"lora_dropout": 0.5}
    assert train(lora(**fields), 3).losses == train(lora(**fields), 3).losses
    assert train(lora(**fields, seed=1), 3).losses != train(lora(**fields), 3).losses


# ---- what peft has besides ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"adapter": "peft", "peft": {"peft_type": "VERA", "r": 4}}, "vera_lambda"),
        ({"adapter": "peft", "peft": {"peft_type": "loha", "r": 4}}, "hada_w1_a"),
        ({"adapter": "peft", "peft": {"peft_type": "OFT", "oft_block_size": 16}}, "oft_R"),
        (
            {"adapter": "peft", "peft": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}},
            "prompt_encoder",
        ),
        ({"adapter": "lora", "peft": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
    ],
)
def test_any_method_of_peft_by_its_own_fields(fields: dict[str, Any], part: str) -> None:
    trained = train(tiny(**fields), 2)
    names = trained_names(trained.training.model)
    assert any(part in name for name in names)
    assert trained.losses[1] != trained.losses[0]


@pytest.mark.parametrize("method", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"])
def test_a_method_of_learned_tokens_asks_for_their_number(method: str) -> None:
    with pytest.raises(InputError, match=rf"Write peft: {{peft_type: {method}, num_virtual_tokens: 20}}\."):
        build_model(tiny(adapter="peft", peft={"peft_type": method}), CPU)


def test_a_target_that_peft_itself_names_is_a_name_and_no_letters() -> None:
    tokens = {"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 2]}
    model = build_model(tiny(adapter="peft", peft=tokens), CPU)
    assert all("trainable_tokens" in name for name in trained_names(model))


def test_lora_on_the_experts_of_a_mixture() -> None:
    experts = {"target_parameters": ["mlp.experts.down_proj"]}
    model = build_model(lora("mixtral", lora_targets=["q_proj"], peft=experts), CPU)
    assert adapted_modules(model) == in_both_blocks("mixtral", ["self_attn.q_proj", "mlp.experts"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"adapter": "lora", "peft": {"init_lora_wieghts": 1}},
            "has no field init_lora_wieghts. Did you mean init_l",
        ),
        ({"adapter": "lora", "peft": {"r": 8}}, "r has a field of its own in a recipe: write lora_rank"),
        ({"adapter": "lora", "peft": {"use_dora": True}}, "write use_dora"),
        ({"adapter": "peft", "peft": {"peft_type": "VERRA"}}, "no method VERRA. Did you mean vera"),
        ({"adapter": "lora", "peft": {"init_lora_weights": "never"}}, "peft: .*never"),
        ({"adapter": "peft", "peft": {"peft_type": "VERA", "r": -1}}, "peft: "),
    ],
)
def test_pefts_own_class_checks_its_fields(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_model(tiny(**fields), CPU)


def test_where_no_target_is_there_the_layers_are_named() -> None:
    for kind, names in (("llama", "gate_proj, k_proj, o_proj, q_proj"), ("gpt2", "c_attn, c_fc, c_proj")):
        with pytest.raises(InputError, match=names):
            build_model(lora(kind, lora_targets=["qproj"]), CPU)


def test_lora_plus_groups_weights_as_peft_does() -> None:
    from peft.optimizers import create_loraplus_optimizer

    recipe = lora(lora_plus_ratio=16, learning_rate=1e-3, use_dora=True)
    model = build_model(recipe, CPU)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)

    def rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
        return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}

    ours = rates(build_optimizer(recipe, model))
    assert ours == rates(theirs)
    assert set(ours.values()) == {1e-3, 16e-3}


@pytest.mark.parametrize("kind", ["falcon_h1", "nemotron_h"])
def test_of_a_mamba_model_the_layers_that_peft_adapts_are_listed(kind: str, tmp_path: Path) -> None:
    """With all-linear peft asks for out_proj, which it refuses. The list of the others is one it takes."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config(CONFIG_MAPPING[kind]())))
    recipe = tiny("llama", adapter="lora").model_copy(update={"model": str(path)})
    with pytest.raises(InputError, match="'out_proj' is incompatible") as refused:
        build_model(recipe, CPU)
    listed = str(refused.value).rpartition("The others are lora_targets: [")[2].rstrip("].").split(", ")
    assert {"in_proj", "q_proj"} < set(listed)
    assert "out_proj" not in listed
    assert trained_names(build_model(recipe.model_copy(update={"lora_targets": tuple(listed)}), CPU))
