"""A step divided among ranks is the step of one process: its losses, and the weights that were divided."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GPTNeoXConfig

from harness.recipe.recipe import Recipe
from harness.training.model import build_model
from tests.support.places import ROOT
from tests.support.ranks import Result, trained, trained_on
from tests.support.tiny import CPU, tiny

ROUNDING = 1e-6
"""Relative, of a loss in fp32 after three steps: sums over ranks are formed in another order."""
LORA = {"adapter": "lora"}
QLORA = {"adapter": "lora", "quantization": "nf4", "double_quant": True}
UNEVEN = {"data": str(ROOT / "recipes/data/guide.txt"), "packing": True}
"""Rows with different numbers of predicted tokens."""
FSDP = {"parallel": "fsdp", "dp_shard": 2}
DDP = {"parallel": "ddp", "dp_replicate": 2}
TP = {"parallel": "tp", "tp": 2}
PRETRAINED = {"weights": "pretrained"}
TWICE: dict[str, Any] = {"micro_batch_size": 1, "gradient_accumulation_steps": 2}

ON_TWO: dict[str, dict[str, Any]] = {
    "fsdp": FSDP,
    "ddp": DDP,
    "tp": TP,
    "fsdp lora": FSDP | LORA,
    "ddp lora": DDP | LORA,
    "tp lora": TP | LORA,
    "fsdp qlora": FSDP | QLORA,
    "ddp qlora": DDP | QLORA,
    "fsdp clipped": FSDP | {"max_grad_norm": 0.1},
    "tp clipped": TP | {"max_grad_norm": 0.1},
    "fsdp uneven": FSDP | UNEVEN,
    "ddp uneven": DDP | UNEVEN,
    "fsdp accumulating": FSDP | TWICE,
    "fsdp accumulating, summed once": FSDP | TWICE | {"sync_each_micro_batch": False},
    "ddp accumulating, summed once": DDP | TWICE | {"sync_each_micro_batch": False},
    "fsdp checkpointing": FSDP | {"gradient_checkpointing": True},
    "fsdp kept after forward": FSDP | {"reshard_after_forward": False},
    "fsdp as accelerate": FSDP | {"wrap": "accelerate"},
    "fsdp as transformers": FSDP | {"wrap": "transformers"},
    "fsdp lora as transformers": FSDP | LORA | {"wrap": "transformers"},
    "fsdp tied": FSDP | {"family": "gemma2", "attention": "eager", "wrap": "transformers"},
    "tp tied": TP | {"family": "gemma2", "attention": "eager"},
    "tp pythia": TP | {"family": "pythia"},
    "fsdp mixtral": FSDP | {"family": "mixtral"},
    "ddp adafactor": DDP | {"optimizer": "adafactor"},
    "fsdp in host memory": FSDP | {"cpu_offload": True},
    "fsdp pretrained": FSDP | PRETRAINED,
    "fsdp qlora pretrained": FSDP | QLORA | PRETRAINED,
    "tp lora pretrained": TP | LORA | PRETRAINED,
    "tp without a plan": TP | {"family": "gpt2"},
    "tp of a mixture": TP | {"family": "mixtral"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "fsdp on 4": {"parallel": "fsdp", "dp_shard": 4},
    "hybrid sharding": {"parallel": "fsdp", "dp_shard": 2, "dp_replicate": 2},
    "fsdp+tp": {"parallel": "fsdp+tp", "dp_shard": 2, "tp": 2, "max_grad_norm": 0.1},
    "fsdp+tp lora": {"parallel": "fsdp+tp", "dp_shard": 2, "tp": 2} | LORA,
    "more ranks than heads": {"parallel": "tp", "tp": 4},
}
OF_RANKS = (
    *("parallel", "dp_replicate", "dp_shard", "tp", "wrap", "cpu_offload"),
    *("sync_each_micro_batch", "reshard_after_forward"),
)
REFUSED = {
    "more ranks than heads": "tp: 4 does not divide the 2 num_key_value_heads",
    "fsdp in host memory": "there is no GPU here to take the weights off",
    "tp without a plan": "no plan that divides the layers of gpt2",
    "tp of a mixture": "mixtral is divided by moe_tp_experts, packed_colwise, which is not built here",
}
# before transformers 5.24 Pythia's plan does not name its embeddings
PLAN = GPTNeoXConfig.base_model_tp_plan or {}
WHOLE_UNDER_TP = re.compile(
    r"norm|(q|k|v|gate|up)_proj\.lora_A|(o|down)_proj\.lora_B"  # of LoRA's two, the one on the undivided side
    r"|attention\.dense\.bias|dense_4h_to_h\.bias" + ("" if "embed_in" in PLAN else "|embed_in")
)
"""The weights of which every rank has all, by name."""
ROWS = 4
"""In a step, whoever has them."""


def with_rows(fields: dict[str, Any]) -> dict[str, Any]:
    shared_by = fields.get("dp_replicate", 1) * fields.get("dp_shard", 1)
    return {"micro_batch_size": ROWS // shared_by} | fields


def in_one_process(fields: dict[str, Any]) -> dict[str, Any]:
    alone = {name: value for name, value in fields.items() if name not in OF_RANKS}
    return alone | {"micro_batch_size": ROWS, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    build_model(tiny(seed=1), CPU).save_pretrained(folder)
    return folder


def recipe_of(fields: dict[str, Any], checkpoint: Path) -> Recipe:
    return tiny(**({"model": str(checkpoint)} if "weights" in fields else {}) | fields)


@pytest.fixture(scope="module")
def on_ranks(checkpoint: Path) -> dict[str, Result]:
    two = trained_on(2, {name: recipe_of(with_rows(fields), checkpoint) for name, fields in ON_TWO.items()})
    four = {name: recipe_of(with_rows(fields), checkpoint) for name, fields in ON_FOUR.items()}
    return two | trained_on(4, four)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, Result]:
    """By case; what several cases have in common is trained once."""
    known: dict[str, Result] = {}
    for fields in (ON_TWO | ON_FOUR).values():
        recipe = recipe_of(in_one_process(fields), checkpoint)
        known.setdefault(recipe.model_dump_json(), trained(recipe, 3))
    return known


@pytest.mark.parametrize("name", [name for name in ON_TWO | ON_FOUR if name not in REFUSED])
def test_losses_and_weights_are_those_of_one_process(
    name: str, on_ranks: dict[str, Result], alone: dict[str, Result], checkpoint: Path
) -> None:
    fields = (ON_TWO | ON_FOUR)[name]
    ours, theirs = on_ranks[name], alone[recipe_of(in_one_process(fields), checkpoint).model_dump_json()]
    assert not ours.failed, ours.failed
    assert ours.losses == pytest.approx(theirs.losses, rel=ROUNDING)
    assert len(set(ours.losses)) == 3, "nothing was trained"
    assert ours.digests == theirs.digests
    shards, tp = fields.get("dp_shard", 1), fields.get("tp", 1)
    assert ours.held_bytes == {
        weight: size_bytes // (shards * (1 if WHOLE_UNDER_TP.search(weight) else tp))
        for weight, size_bytes in theirs.held_bytes.items()
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_a_sentence(name: str, on_ranks: dict[str, Result]) -> None:
    assert re.search("(InputError|CannotDivide): ", on_ranks[name].failed)
    assert REFUSED[name] in on_ranks[name].failed
