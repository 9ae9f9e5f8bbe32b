"""Nothing that napkin computes depends on a name shown to people, and each toggle is read in one file."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from harness.architecture.model_shape import load_shape
from harness.hardware.hardware import find_hardware
from harness.napkin.memory.moment import Moment
from harness.napkin.memory.optimizer import OptimizerMemory
from harness.napkin.prediction import estimate, profile
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import Op, Tensor
from harness.recipe.recipe import Recipe
from pages.source import FILES, nodes

H200 = find_hardware("h200")
LORA = {"adapter": "lora"}
OTHER_VALUES = {
    "none": {},
    "packing": {"packing": True},
    "window": {"model": "mistral-7b", "seq_len": 8192},
    "mixed": {"precision": "bf16-mixed"},
    "fp16": {"precision": "fp16", "max_grad_norm": 1.0},
    "master weights": {"precision": "fp16", "master_weights": True},
    "nf4": {**LORA, "quantization": "nf4", "double_quant": True, "upcast_for_kbit": True},
    "int8": {**LORA, "quantization": "int8", "gradient_checkpointing": True},
    "nf4 experts": {
        "model": "mixtral-8x7b",
        **LORA,
        "quantization": "nf4",
        "lora_targets": ("q_proj",),
    },
    "adapted experts": {"model": "mixtral-8x7b", **LORA},
    "lora": {**LORA, "lora_rank": 64, "lora_dropout": 0.1, "adapter_dtype": "base"},
    "adapted head": {**LORA, "lora_targets": ("q_proj", "lm_head"), "offload": ("parameters",)},
    "ia3": {"adapter": "ia3"},
    "checkpointing": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "eager": {"attention": "eager"},
    "softcap": {"model": "gemma-2-2b", "attention": "eager", "seq_len": 512},
    "flash": {"attention": "flash_attention_2"},
    "fused loss": {"loss": "fused_linear", "seq_len": 4096},
    "8 bit": {"optimizer": "paged_adamw_8bit"},
    "adafactor": {"optimizer": "adafactor", "optimizer_impl": "for_loop", "weight_decay": 0.1},
    "in backward": {"optimizer_in_backward": True},
    "activations offloaded": {"offload": ("activations",)},
    "optimizer offloaded": {"offload": ("optimizer",)},
    "parameters offloaded": {"offload": ("parameters",), "gradient_checkpointing": True},
    "compiled": {"compile": True},
}


def numbers(fields: dict) -> dict:
    """Every number of the answer; the captions of the largest tensors are left out."""
    recipe = Recipe(**{"model": "llama-3.2-1b", "micro_batch_size": 2, "seq_len": 1024, **fields})
    memory = estimate(recipe, H200, load_shape(recipe.model))
    answer = profile(memory).model_dump()
    for holder in (answer, answer["oom"] or {"top": []}):
        holder["top"] = [entry["size_bytes"] for entry in holder["top"]]
    moments = [{k: v for k, v in vars(moment).items() if k != "where"} for moment in memory.moments]
    return {"profile": answer, "moments": moments, "host": memory.sizes.host_parts}


@pytest.mark.parametrize("toggle", OTHER_VALUES)
def test_renaming_what_is_shown_changes_no_number(toggle, monkeypatch):
    before = numbers(OTHER_VALUES[toggle])
    renamed = defaultdict(int)

    def rename(kind: type, field: str) -> None:
        plain = kind.__init__

        def init(self, *args, **fields):
            plain(self, *args, **fields)
            object.__setattr__(self, field, f"nom {renamed[kind]}")
            renamed[kind] += 1

        monkeypatch.setattr(kind, "__init__", init)

    for kind, field in (
        (Tensor, "name"),
        (Op, "name"),
        (Stage, "name"),
        (Moment, "where"),
        (OptimizerMemory, "title"),
        (OptimizerMemory, "implementation"),
        (OptimizerMemory, "source"),
    ):
        rename(kind, field)
    assert numbers(OTHER_VALUES[toggle]) == before
    assert len(renamed) == 5


def test_the_recipes_above_have_every_toggle():
    alone = {"weight_decay", "max_grad_norm", "gradient_accumulation_steps"}
    changed = {name for fields in OTHER_VALUES.values() for name in fields}
    assert set(TOGGLES) <= changed | alone


TOGGLES = (
    "precision",
    "master_weights",
    "quantization",
    "double_quant",
    "upcast_for_kbit",
    "adapter",
    "lora_rank",
    "lora_dropout",
    "lora_targets",
    "adapter_dtype",
    "gradient_checkpointing",
    "attention",
    "loss",
    "optimizer",
    "optimizer_impl",
    "optimizer_in_backward",
    "offload",
    "compile",
    "packing",
    "max_grad_norm",
    "weight_decay",
    "gradient_accumulation_steps",
)


def reads() -> dict[str, set[str]]:
    """By recipe field: the files of napkin that read it off a recipe."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in (file for file in FILES if file.startswith("napkin/")):
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr in Recipe.model_fields:
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name == "recipe":
                    found[node.attr].add(file)
    return found


def test_a_toggle_is_priced_in_one_file():
    found = reads()
    assert {"gradient_checkpointing", "loss", "compile", "packing"} <= set(found)
    assert {field: files for field, files in found.items() if field in TOGGLES and len(files) > 1} == {}
