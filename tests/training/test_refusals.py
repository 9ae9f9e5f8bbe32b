"""Models that cannot run as a recipe says, or are no causal language models: said before anything runs. What
the code of a model raises in a step is told as a sentence; what is ours is not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
    ProphetNetConfig,
    Qwen3MoeConfig,
    RobertaConfig,
    XLNetConfig,
)
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from harness.architecture.config_file import read_config
from harness.errors import InputError, MissingDependency
from harness.hardware.hardware import find_hardware
from harness.recipe.recipe import Recipe
from harness.simulate.simulated_run import simulate
from harness.training.failures import errors_explained
from harness.training.model import build_model
from harness.training.model_config import load_config
from harness.training.refusals import shapes_of, shifts_labels
from tests.support.tiny import built, tiny, train

CPU = torch.device("cpu")
META = torch.device("meta")
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def saved(config: PretrainedConfig, folder: Path) -> str:
    """The path of the config.json that transformers itself writes."""
    config.save_pretrained(folder)
    return str(folder / "config.json")


def recipe_of(config: PretrainedConfig, folder: Path, **fields: Any) -> Recipe:
    return Recipe(**{"model": saved(config, folder), "precision": "fp32", "seq_len": 16, **fields})


def test_a_model_that_sees_what_it_predicts_is_refused(tmp_path: Path) -> None:
    for config in (BertConfig(**SMALL), RobertaConfig(**SMALL)):
        with pytest.raises(
            InputError, match=r'looks at the tokens that it is to predict. Write "is_decoder": t'
        ):
            build_model(recipe_of(config, tmp_path), META)
    build_model(recipe_of(BertConfig(**SMALL, is_decoder=True), tmp_path), META)


def test_what_is_refused_as_bidirectional_is_so_and_what_is_accepted_not(tmp_path: Path) -> None:
    """The oracle is the model: does another last token change what comes out at the first?"""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    for is_decoder in (False, True):
        model = AutoModelForCausalLM.from_config(BertConfig(**SMALL, is_decoder=is_decoder)).eval()
        first = model(input_ids=ids).logits[:, 0]
        assert torch.equal(first[0], first[1]) == is_decoder


def test_a_loss_that_does_not_shift_is_refused(tmp_path: Path) -> None:
    config = XLNetConfig(vocab_size=300, d_model=64, n_layer=2, n_head=4, d_inner=64)
    with pytest.raises(InputError, match="would learn to copy"):
        build_model(recipe_of(config, tmp_path, attention="eager"), META)


@pytest.mark.parametrize(
    ("config", "shifts"),
    [
        (LlamaConfig(**SMALL), True),
        (BertConfig(**SMALL, is_decoder=True), True),
        (XLNetConfig(vocab_size=300, d_model=64, n_layer=2, n_head=4, d_inner=64), False),
        (ProphetNetConfig(vocab_size=300, num_decoder_layers=2, num_encoder_layers=2), False),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_whether_a_loss_shifts_is_seen_in_its_forward_pass(config: PretrainedConfig, shifts: bool) -> None:
    assert shifts_labels(shapes_of(Recipe(model="tiny"), config)) is shifts


def test_one_error_names_all_that_must_change(tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = GptOssConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4
    )
    recipe = recipe_of(config, tmp_path, adapter="lora", lora_targets=("q_proj", "w1"))
    with pytest.raises(InputError) as caught:
        build_model(recipe, META)
    lines = "attention: eager, lora_targets: [k_proj, o_proj, q_proj, v_proj]."
    assert str(caught.value).endswith(f"All that must change: {lines}")
    changed = recipe.model_copy(
        update={"attention": "eager", "lora_targets": ("k_proj", "o_proj", "q_proj", "v_proj")}
    )
    build_model(changed, META)


def test_a_mixture_whose_inputs_cannot_be_dropped_says_what_to_write(tmp_path: Path) -> None:
    """Where peft adapts parameters that are no linear layers: said alone, and with what else must change."""
    sizes = {**SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 4}
    fields = {"adapter": "lora", "lora_dropout": 0.1}
    recipe = recipe_of(Qwen3MoeConfig(**sizes), tmp_path, **fields)
    with pytest.raises(
        InputError, match=r"lora_dropout: 0\.1: .*cannot drop their inputs; set lora_dropout: 0,"
    ):
        build_model(recipe, META)
    build_model(recipe.model_copy(update={"lora_dropout": 0.0}), META)
    fused = recipe_of(Qwen3MoeConfig(**sizes, attn_logit_softcapping=1.0), tmp_path, **fields)
    with pytest.raises(InputError, match="All that must change: attention: eager, lora_dropout: 0"):
        build_model(fused, META)


# --- what transformers writes -------------------------------------------------------------------------


def test_a_granite_without_experts_is_read(tmp_path: Path) -> None:
    """Granite-4's dense members: a mixture's family with no expert."""
    config = GraniteMoeHybridConfig(
        **SMALL,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=64,
        layer_types=["attention", "attention"],
    )
    assert simulate(recipe_of(config, tmp_path), find_hardware("t4"))[0].complete


def test_experts_that_are_needed_and_not_there_are_refused(tmp_path: Path) -> None:
    values = json.loads(Path(tiny("mixtral").model).read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"num_local_experts": 0}))
    with pytest.raises(InputError, match=r"makes .*mlp\..* a weight of shape \(0, .*Correct the size"):
        build_model(tiny("mixtral", model=str(path)), CPU)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    recipe = recipe_of(Mamba2Config(**{**SMALL, "num_heads": 8, "head_dim": 16}), tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path / "config.json")["time_step_limit"] == [0.0, float("inf")]
    assert load_config(recipe).time_step_limit[1] == float("inf")


def test_a_row_longer_than_the_positions_is_refused_before_data_and_weights_are_made() -> None:
    with pytest.raises(InputError, match=r"seq_len: 4096: .* has \d+ positions; set at most that"):
        load_config(tiny("gpt2", seq_len=4096))


H100 = find_hardware("h100")


def _failing(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The model's own code, given something that it cannot work with."""
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: forward(mlp, change(x)))


@pytest.mark.parametrize(
    ("fields", "fix"),
    [({}, "the error is in its own code"), ({"adapter": "lora"}, r"List other layers in lora_targets")],
)
def test_where_and_what_and_the_fix(fields: Any, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, lambda x: x[..., :3])
    with pytest.raises(InputError, match=rf"of llama fails at \S+:\d+: RuntimeError: .*{fix}"):
        train(tiny(**fields), 1)


def test_a_simulation_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, lambda x: x)
    monkeypatch.setattr(type(ACT2FN["silu"]), "forward", lambda self, x: x * x.sum().tolist())
    with pytest.raises(InputError, match=r"llama asks for values, at transformers.*virtual GPU"):
        simulate(tiny(), H100)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("FROD", r"peft: \{peft_type: FROD\}: peft asks for values of"),
        ("SHIRA", "llama asks for values, at peft/"),
    ],
)
def test_methods_that_compute_with_values_are_refused(method: str, says: str) -> None:
    """FROD decomposes the model's weights on the host; SHiRA's are in sparse tensors."""
    recipe = tiny(adapter="peft", lora_targets=["q_proj"], peft={"peft_type": method})
    with pytest.raises(InputError, match=says):
        simulate(recipe, H100)


@pytest.mark.parametrize(
    ("method", "says"), [("HRA", "of llama fails at peft/"), ("TINYLORA", "peft: {peft_type: TINYLORA}")]
)
def test_methods_that_adapt_no_quantized_layer_are_told_apart(method: str, says: str) -> None:
    """peft's own code fails, in a step or before it."""
    fields: dict[str, Any] = {"quantization": "nf4", "precision": "bf16", "lora_targets": ["q_proj"]}
    with pytest.raises(InputError, match=rf"{says}.* Set quantization: none, or adapter: lora"):
        simulate(tiny(adapter="peft", peft={"peft_type": method}, **fields), H100)


def test_ddp_waits_for_what_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters of layers that a model shares may do so, as Zamba2's."""
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x)
    with pytest.raises(InputError, match=r"some of llama have none after a step\. Set parallel: fsdp"):
        simulate(tiny(parallel="ddp", dp_replicate=2), H100)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt(), MemoryError()])
def test_what_means_something_else_stays(error: BaseException) -> None:
    with pytest.raises(type(error)), errors_explained(built(tiny())[0].model):
        raise error


def test_a_mistake_of_ours_stays() -> None:
    with pytest.raises(RuntimeError, match="ours"), errors_explained(built(tiny())[0].model):
        raise RuntimeError("ours")


def test_a_rank_that_is_gone_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers parameters from within the model's code, where gloo then says that a rank is gone."""

    def gathers(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("gloo/transport/tcp/pair.cc:537 Read error: Connection reset by peer")

    _failing(monkeypatch, gathers)
    with pytest.raises(RuntimeError, match="Connection reset by peer"):
        train(tiny(), 1)


WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "peft": ({"adapter": "lora"}, r"adapter: lora needs the package peft.* pip install peft"),
    "liger_kernel.transformers": ({"loss": "fused_linear"}, r"finetune-harness\[liger\]"),
    "trl": ({"loss": "fused_lm_head"}, r"loss: fused_lm_head .*finetune-harness\[dpo\]"),
    "trl.trainer": ({"task": "dpo", "lora_dropout": 0.0}, r"finetune-harness\[dpo\]"),
    "torchao.float8": ({"precision": "bf16", "fp8": True}, r"finetune-harness\[torchao\]"),
    "torchao.optim": ({"optimizer": "adamw_torch_8bit"}, r"finetune-harness\[torchao\]"),
    "galore_torch": ({"optimizer": "galore_adamw"}, r"finetune-harness\[galore\]"),
    "apollo_torch": ({"optimizer": "apollo_adamw"}, r"finetune-harness\[apollo\]"),
    "schedulefree": ({"optimizer": "adamw_schedule_free"}, r"finetune-harness\[schedule-free\]"),
}


@pytest.mark.parametrize("package", WITHOUT)
def test_without_its_package_a_toggle_names_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # Liger's kernels would be refused on a CPU
    fields, said = WITHOUT[package]
    whole = package.partition(".")[0]
    for name in [name for name in sys.modules if name.startswith(f"{whole}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in {whole, package}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=said):
        built(tiny(**fields))
