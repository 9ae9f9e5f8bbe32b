"""adapter and its fields: what is trained, how it begins, and that merging it changes nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


def pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(A, B) of each adapted module."""
    found = dict(model.named_parameters())
    return [(p, found[name.replace("lora_A", "lora_B")]) for name, p in found.items() if "lora_A" in name]


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


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("family", TARGETS)
def test_a_is_kaiming_uniform_and_b_zero(family: str, rank: int) -> None:
    """Kaiming uniform with a = sqrt(5) (He 2015, as nn.Linear) is uniform within 1 / sqrt(inputs)."""
    layers = pairs(build_model(lora(family, lora_rank=rank), CPU))
    assert layers
    scaled = []
    for a, b in layers:
        assert not b.any()
        scaled.append(a.flatten() * math.sqrt(a.shape[1]))
        if family != "mixtral":  # there all experts of a layer share one pair of matrices, side by side
            assert (a.shape[0], b.shape[1]) == (rank, rank)
    values = torch.cat(scaled)
    assert values.abs().max().item() == pytest.approx(1, rel=0.01)
    assert values.abs().max() <= 1
    quarters = torch.histc(values, bins=4, min=-1, max=1) / len(values)
    torch.testing.assert_close(quarters, torch.full((4,), 0.25), rtol=0, atol=0.02)


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


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "pythia", "gemma2"])
def test_it_begins_as_the_base(family: str, adapter: str) -> None:
    input_ids = torch.arange(32).reshape(2, 16)
    model = build_model(lora(family, adapter=adapter), CPU)
    base = build_model(lora(family, adapter="none"), CPU)
    assert torch.equal(model(input_ids=input_ids).logits, base(input_ids=input_ids).logits)


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


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("adapter", ["lora", "ia3"])
def test_merging_gives_the_same_logits(family: str, adapter: str) -> None:
    fields = {"lora_targets": ["k_proj", "v_proj"]} if (family, adapter) == ("mixtral", "ia3") else {}
    model = train(lora(family, adapter=adapter, learning_rate=0.05, **fields), 3).training.model.eval()
    input_ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        before = model(input_ids=input_ids).logits
        with model.disable_adapter():  # type: ignore[operator]
            base = model(input_ids=input_ids).logits
        merged = model.merge_and_unload()  # type: ignore[operator]
        after = merged(input_ids=input_ids).logits
    assert not trained_names(merged)
    assert (before - base).abs().max() > 100 * (before - after).abs().max()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rank", "alpha"), [(8, 32.0), (16, 16.0), (4, 2.0)])
def test_what_is_added_is_alpha_over_rank_times_b_a(rank: int, alpha: float) -> None:
    """Hu 2021, section 4.1."""
    recipe = lora(lora_rank=rank, lora_alpha=alpha, lora_targets=["up_proj"], learning_rate=0.05)
    model = train(recipe, 2).training.model
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight  # type: ignore[union-attr]
    expected = layer.base_layer.weight + alpha / rank * (b @ a)  # type: ignore[union-attr,operator]
    merged = model.merge_and_unload().get_submodule("model.layers.0.mlp.up_proj").weight  # type: ignore[operator]
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)


def test_dropout_drops_inputs_of_a_and_only_in_training() -> None:
    model = train(lora(lora_dropout=0.5, learning_rate=0.05), 2).training.model
    rates = {m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0}
    assert rates == {0.5}
    input_ids = torch.arange(32).reshape(2, 16)

    def logits() -> Tensor:
        return model(input_ids=input_ids).logits

    model.train()
    assert not torch.equal(logits(), logits())
    model.eval()
    assert torch.equal(logits(), logits())


def test_the_seed_decides_the_weights_and_the_dropout() -> None:
    fields = {"lora_dropout": 0.5}
    assert train(lora(**fields), 3).losses == train(lora(**fields), 3).losses
    assert train(lora(**fields, seed=1), 3).losses != train(lora(**fields), 3).losses


def test_ia3_scales_keys_values_and_the_inner_activations() -> None:
    """Liu 2022, section 3.3: three learned vectors a block, all ones at first."""
    model = build_model(lora(adapter="ia3"), CPU)
    assert adapted_modules(model) == in_both_blocks(
        "llama", ["self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"]
    )
    vectors = [p for p in model.parameters() if p.requires_grad]
    assert sorted(p.numel() for p in vectors) == [32] * 4 + [128] * 2
    assert all((p == 1).all() for p in vectors)


def test_the_base_is_the_same_bits_with_and_without_an_adapter() -> None:
    base = weights(built(tiny())[0])
    adapted = weights(built(lora())[0])
    ours = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
        for name, weight in adapted.items()
        if "lora_" not in name
    }
    assert same_bits(ours, base)


# ---- what peft has besides ---------------------------------------------------------------------------


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    plain, rooted = (build_model(lora(lora_rank=16, use_rslora=on), CPU) for on in (False, True))
    scales = [
        {m.scaling["default"] for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)}
        for model in (plain, rooted)
    ]
    assert scales == [{32 / 16}, {32 / math.sqrt(16)}]


def test_dora_begins_as_the_base_and_trains_lengths() -> None:
    tokens = torch.arange(8)[None]
    base, model = build_model(tiny(), CPU), build_model(lora(use_dora=True), CPU)
    torch.testing.assert_close(model(tokens).logits, base(tokens).logits)
    lengths = {name: p for name, p in model.named_parameters() if "lora_magnitude_vector" in name}
    assert len(lengths) == 2 * len(LLAMA)
    assert all(p.requires_grad for p in lengths.values())
    rows = base.model.layers[0].self_attn.q_proj.weight.norm(dim=1)
    (first,) = [p for name, p in lengths.items() if "layers.0.self_attn.q_proj" in name]
    torch.testing.assert_close(first, rows)


def test_dora_is_pefts_own() -> None:
    """What was trained makes the same of the same tokens in a model that peft alone has adapted."""
    import peft

    model = train(lora(use_dora=True, lora_targets=["q_proj"]), 3).training.model.eval()
    base = build_model(tiny(), CPU).eval()
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj"], use_dora=True)
    tokens = torch.arange(8)[None]
    plain = base(tokens).logits
    theirs = peft.get_peft_model(base, config).eval()
    theirs.load_state_dict(model.state_dict())
    assert not torch.allclose(model(tokens).logits, plain, atol=1e-4)
    assert torch.equal(model(tokens).logits, theirs(tokens).logits)


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


@pytest.mark.parametrize("method", ["LN_TUNING", "IA3"])
def test_what_a_method_adapts_by_itself_is_peft_s_own_choice(method: str) -> None:
    """all-linear, the field's default, would train a copy of every linear layer under LN_TUNING."""
    model = build_model(tiny(adapter="peft", peft={"peft_type": method}), CPU)
    import peft

    theirs = peft.get_peft_model(
        build_model(tiny(), CPU),  # type: ignore[arg-type]
        peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[method](task_type="CAUSAL_LM"),
    )
    assert trained_names(model) == trained_names(theirs)
    assert not any("mlp.gate_proj" in name for name in trained_names(model))


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
