"""gradient_checkpointing: the same numbers, and a block's input is all that is kept of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.support.tiny import (
    MODELS,
    ByteObserver,
    NullObserver,
    built,
    same_bits,
    step,
    tiny,
    train,
    weights,
)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16-mixed"},
        {"precision": "fp16-mixed", "max_grad_norm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"adapter": "lora", "lora_dropout": 0.5},  # the same inputs must be dropped again
        {"adapter": "lora", "quantization": "nf4", "precision": "bf16", "upcast_for_kbit": True},
        {"adapter": "ia3"},
        {"packing": True},
        {"attention": "eager"},
        {"family": "gpt2"},
        {"family": "pythia"},
        {"family": "mixtral"},
        {"family": "mixtral", "adapter": "lora", "lora_targets": ["q_proj"], "quantization": "nf4"},
        {"family": "gemma2", "attention": "eager"},
    ],
)
def test_the_same_bits(fields: dict[str, Any]) -> None:
    plain = train(tiny(**fields), 4)
    checkpointed = train(tiny(**fields, gradient_checkpointing=True), 4)
    assert checkpointed.losses == plain.losses
    assert same_bits(weights(checkpointed.training), weights(plain.training))


def kept_by_forward(folder: Path, num_blocks: int, **fields: Any) -> int:
    """Bytes that are on the device when forward is over and were not before it."""
    config = json.loads((MODELS / "llama.json").read_text()) | {"num_hidden_layers": num_blocks}
    path = folder / f"{num_blocks}.json"
    path.write_text(json.dumps(config))
    observer = ByteObserver()
    training, batches = built(tiny(model=str(path), **fields), observer)
    before: list[int] = []
    observer.beginning["forward"] = lambda: before.append(observer.allocated_bytes)
    step(training, batches, observer)
    return observer.end_bytes["forward"] - before[0]


@pytest.mark.parametrize("fields", [{}, {"adapter": "lora"}, {"precision": "bf16"}])
def test_a_block_keeps_its_input_and_nothing_else(fields: dict[str, Any], tmp_path: Path) -> None:
    """Two more blocks keep two more inputs: 2 rows of 16 tokens of 64 numbers."""
    number_bytes = 2 if fields.get("precision") == "bf16" else 4
    input_bytes = 2 * 16 * 64 * number_bytes
    two, four = (kept_by_forward(tmp_path, n, gradient_checkpointing=True, **fields) for n in (2, 4))
    assert four - two == 2 * input_bytes
    two, four = (kept_by_forward(tmp_path, n, **fields) for n in (2, 4))
    assert four - two > 10 * 2 * input_bytes


def test_blocks_are_computed_twice_and_the_head_once() -> None:
    """A matrix product costs 2 FLOPs a weight and token forward and 4 backward (Kaplan 2020, table 1).

    Recomputing stops as soon as nothing more is needed (torch.utils.checkpoint, early stop): of a block's
    seven products all but the last, which nobody needs, are done again. Attention's own are counted apart.
    """
    flops: dict[bool, int] = {}
    for checkpointing in (False, True):
        training, batches = built(tiny(gradient_checkpointing=checkpointing, attention="eager"))
        with FlopCounterMode(display=False) as counter:
            step(training, batches)
        flops[checkpointing] = counter.get_total_flops()
    tokens, hidden, inner, head_dim = 2 * 16, 64, 128, 16
    again = (
        2 * hidden * hidden + 2 * hidden * 2 * head_dim + 2 * hidden * inner
    )  # q o, k v, gate up; not down
    attention = 2 * (2 * 4 * 16 * 16 * head_dim) * 2  # two rows, four heads: scores, and their sum of values
    assert flops[True] - flops[False] == 2 * (2 * tokens * again + attention)


@pytest.mark.parametrize("fields", [{}, {"adapter": "lora", "lora_dropout": 0.5}, {"attention": "eager"}])
def test_selective_the_same_bits_and_no_product_twice(fields: dict[str, Any]) -> None:
    """As PyTorch's selective checkpointing promises: what the policy keeps is not computed again."""
    flops: dict[str, int] = {}
    results = []
    for name, more in {
        "plain": {},
        "selective": {"gradient_checkpointing": True, "selective_checkpointing": True},
        "all": {"gradient_checkpointing": True},
    }.items():
        training, batches = built(tiny(**fields, **more))
        with FlopCounterMode(display=False) as counter:
            step(training, batches, NullObserver())
        flops[name] = counter.get_total_flops()
        results.append(weights(training))
    assert flops["plain"] <= flops["selective"] < flops["all"]
    if "adapter" not in fields:
        assert flops["plain"] == flops["selective"]
    assert same_bits(results[0], results[1])
