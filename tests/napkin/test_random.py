"""Napkin's peak against the simulated one, over random recipes of full-size models.

`python tests/napkin/test_random.py FIRST LAST` prints every case and the distribution, whole models; the
suite runs a few dozen with eight layers each, which have the same widths.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.hardware.hardware import Hardware, find_hardware
from harness.napkin.prediction import predict
from harness.recipe.recipe import Recipe
from harness.simulate.simulated_run import simulate
from tests.support.napkin_oracle import keeps_workspaces
from tests.support.places import ROOT

SEED = 20_260
TOLERANCE = 0.05
CASES, LAYERS = 36, 8
MODELS = ROOT / "recipes" / "models"
NAMES = ("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "mistral-7b", "phi-3-mini", "qwen3-8b")
NAMES += ("gemma-2-2b", "gpt2-medium", "pythia-1.4b", "qwen2.5-0.5b", "qwen2.5-7b", "tinyllama-1.1b")
NOT_IN_LIGER = ("gpt2-medium", "pythia-1.4b")
TOGGLES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp32", "fp16", "bf16-mixed", "fp16-mixed"),
    "master_weights": (False, True),
    "quantization": ("none", "nf4", "fp4", "int8"),
    "double_quant": (False, True),
    "upcast_for_kbit": (False, True),
    "adapter": ("none", "lora", "ia3"),
    "lora_dropout": (0.0, 0.1),
    "adapter_dtype": ("fp32", "base"),
    "gradient_checkpointing": (False, True),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "loss": ("standard", "fused_linear"),
    "optimizer": ("adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw", "adafactor", "sgd", "lion_8bit"),
    "optimizer_impl": ("foreach", "fused", "for_loop"),
    "optimizer_in_backward": (False, True),
    "offload": (
        (),
        ("activations",),
        ("optimizer",),
        ("parameters",),
        ("activations", "optimizer"),
        ("activations", "parameters"),
    ),
    "packing": (False, True),
    "gradient_accumulation_steps": (1, 2, 4),
    "max_grad_norm": (None, 1.0),
    "weight_decay": (0.0, 0.1),
}
"""Each with the default first. `compile` is not among them: it cannot be simulated."""


def drawn(index: int) -> tuple[Recipe, str]:
    """The recipe of a case, each toggle off as often as on, and the device. What cannot be is drawn anew."""
    draw = random.Random(SEED + index)
    while True:
        fields = {
            name: values[0] if draw.random() < 0.5 else draw.choice(values[1:])
            for name, values in TOGGLES.items()
        }
        fields |= {
            "model": draw.choice(NAMES),
            "micro_batch_size": draw.choice([1, 2, 3, 4]),
            "seq_len": draw.choice([256, 512, 1000, 1024, 2048]),
            "lora_rank": draw.choice([8, 16, 64]),
        }
        device = draw.choice(["h200", "a100-80gb", "rtx-4090", "b200"])
        try:
            recipe = Recipe(**fields)
            predict(recipe, find_hardware(device))
            if recipe.loss == "standard" or recipe.model not in NOT_IN_LIGER:
                return recipe, device
        except (InputError, ValueError):  # a pair, or a toggle that the family does not have
            continue


def roomy(name: str) -> Hardware:
    """A device with so much memory that nothing runs out of it."""
    device = find_hardware(name)
    memory = device.datasheet.memory_bytes._replace(value=2**44)
    return replace(device, datasheet=device.datasheet._replace(memory_bytes=memory))


def shallow(recipe: Recipe, folder: Path) -> Recipe:
    """The same with LAYERS layers."""
    config = json.loads((MODELS / f"{recipe.model}.json").read_text())
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    path = folder / "config.json"
    path.write_text(json.dumps(config | {layers: LAYERS}))
    return recipe.model_copy(update={"model": str(path)})


def peaks(recipe: Recipe, device: str) -> tuple[int, int]:
    answer, (found, _) = predict(recipe, roomy(device)), simulate(recipe, roomy(device))
    predicted, simulated = answer.memory.peak_allocated_bytes, found.memory.peak_allocated_bytes
    assert predicted is not None
    assert simulated is not None
    return predicted, simulated


@keeps_workspaces
@pytest.mark.parametrize("index", range(CASES))
def test_a_random_recipe_peaks_where_the_simulation_does(tmp_path, index):
    recipe, device = drawn(index)
    predicted, simulated = peaks(shallow(recipe, tmp_path), device)
    assert predicted == pytest.approx(simulated, rel=TOLERANCE), recipe.model_dump(exclude_defaults=True)


def toggled(recipe: Recipe) -> set[str]:
    return {name for name, values in TOGGLES.items() if getattr(recipe, name) != values[0]}


def test_two_hundred_cases_have_every_pair_of_toggles():
    pairs = {pair for index in range(200) for pair in combinations(sorted(toggled(drawn(index)[0])), 2)}
    impossible = {
        (other, "optimizer_in_backward")
        for other in ("gradient_accumulation_steps", "master_weights", "max_grad_norm")
    }
    assert set(combinations(sorted(TOGGLES), 2)) - pairs == impossible


def main(first: int, last: int) -> None:
    """Print the cases from `first` to `last` and how far off they are."""
    off = []
    for index in range(first, last):
        recipe, device = drawn(index)
        try:
            predicted, simulated = peaks(recipe, device)
        except (InputError, AssertionError) as error:
            print(index, device, recipe.model_dump(exclude_defaults=True), repr(error), flush=True)
            continue
        off.append(abs(predicted / simulated - 1))
        fields = recipe.model_dump(mode="json", exclude_defaults=True)
        print(f"{index} {predicted / simulated - 1:+.2%} {device} {fields}", flush=True)
    off.sort()
    print(f"{len(off)} cases: median {off[len(off) // 2]:.2%}, p90 {off[len(off) * 9 // 10]:.2%}", end=", ")
    print(f"max {off[-1]:.2%}, over 5 %: {sum(each > TOLERANCE for each in off)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
