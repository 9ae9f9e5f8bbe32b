"""A simulation that counts micro batches says what one that walks through all of them says."""

from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.simulate import SimulatedMemory, micro_batches, simulate
from tests.support.long import long
from tests.support.tiny import tiny

H100 = find_hardware("h100")
LORA = {"adapter": "lora", "gradient_checkpointing": True}
COUNTED = 2 * 1
"""Of six micro batches in two steps at least: three show what they do, another may settle the clock, and
the last is walked through."""


def simulated(recipe: Any) -> dict[str, Any]:
    """What a profile says, without its provenance and the loss's module, which a counted one has not."""
    profile = simulate(recipe, H100)[0].model_dump(mode="json")
    del profile["provenance"], profile["memory"]["at_peak_by_module"]
    return profile


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "fp16-mixed", "max_grad_norm": 1.0},
        pytest.param({"precision": "bf16", "loss": "fused_linear"}, marks=long),
        pytest.param({"precision": "bf16", "packing": True, "attention": "eager"}, marks=long),
        pytest.param({"precision": "bf16", "offload": ["activations"], **LORA}, marks=long),
        pytest.param({"precision": "bf16", "offload": ["parameters"]}, marks=long),
        pytest.param({"precision": "bf16", "quantization": "nf4", **LORA}, marks=long),
        pytest.param({"precision": "bf16", "parallel": "ddp", "dp_replicate": 2}, marks=long),
        {"precision": "bf16-mixed", "parallel": "fsdp", "dp_shard": 4},
        pytest.param(
            {"precision": "bf16", "parallel": "fsdp", "dp_shard": 4, "cpu_offload": True}, marks=long
        ),
        pytest.param({"precision": "bf16", "parallel": "fsdp+tp", "dp_shard": 2, "tp": 2}, marks=long),
    ],
    ids=str,
)
def test_micro_batches_are_counted_as_if_they_were_walked_through(
    monkeypatch, fields: dict[str, Any]
) -> None:
    recipe = tiny(gradient_accumulation_steps=6, seq_len=256, **fields)
    asked: list[int] = []
    ask_again = SimulatedMemory.ask_again
    monkeypatch.setattr(
        SimulatedMemory,
        "ask_again",
        lambda memory, requests: (asked.append(len(requests)), ask_again(memory, requests)),
    )
    found = []
    for fewest in (micro_batches.FEWEST, 100):
        monkeypatch.setattr(micro_batches, "FEWEST", fewest)
        found.append((simulated(recipe), len(asked)))  # on one line: stacks have its number
    (counted, requests), (walked, requests_of_both) = found
    assert requests == requests_of_both >= COUNTED
    assert counted == approximately(walked)


def approximately(value: Any) -> Any:
    """Seconds are added in another order; everything else is a whole number or a word."""
    if isinstance(value, dict):
        return {key: approximately(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [approximately(inner) for inner in value]
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


def test_documents_of_other_lengths_are_other_micro_batches(monkeypatch) -> None:
    """flash-attn's packing hands their lengths on, so no micro batch does what the one before it did."""
    recipe = tiny(
        gradient_accumulation_steps=8,
        seq_len=256,
        micro_batch_size=1,
        precision="bf16",
        packing=True,
        attention="flash_attention_2",
    )
    monkeypatch.setattr(SimulatedMemory, "ask_again", None)
    assert simulate(recipe, H100)[0].complete


def test_few_micro_batches_are_all_walked_through(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedMemory, "ask_again", None)
    assert simulate(tiny(gradient_accumulation_steps=4), H100)[0].complete
