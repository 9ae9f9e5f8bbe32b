"""Shipped recipes, simulated against emulated: the peaks of PyTorch's allocator, and how many bytes apart.

    python -m benchmarks.virtual_gpu.recipes [RECIPE ...] [--gpu NAME ...] [--out FILE]

Takes PyTorch's CUDA build and no GPU: each recipe runs its steps on a virtual GPU, whole models at full size.
What FILE has already, of the same versions, is not made again: a run that was cut short goes on.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.command import GrowingTable, parser_of, versions_of
from harness.answers import emulated, predicted
from harness.errors import InputError
from harness.hardware import find_hardware
from harness.recipe import load_recipe
from harness.step_profile import StepProfile

IN_BACKWARD = "llama-3.1-8b-full-bf16-in-backward"
RECIPES = (
    "llama-3.2-1b-bf16",
    "llama-3.1-8b-lora",
    "llama-3.1-8b-qlora",
    "llama-3.2-1b-packing",
    "gpt2-medium-lora",
    "llama-3.2-1b-fp16-mixed",
    "qwen2.5-7b-lora",
    IN_BACKWARD,
    "gemma-2-2b-lora",
)
GPUS = ("h200", "h100", "a100-40gb", "rtx-4090")
STEPS = ("steps=2", "warmup_steps=1")
"""The allocator is at rest after the first: what a later step adds to the peak is the same in each."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def peaks(profile: StepProfile) -> dict[str, Any]:
    memory = profile.memory
    return {
        "allocated_bytes": memory.peak_allocated_bytes,
        "reserved_bytes": memory.peak_reserved_bytes,
        "fits": profile.oom is None,
    }


def row(name: str, gpu: str) -> dict[str, Any]:
    """One recipe on one device: both answers, or the sentence that says why there is none."""
    found: dict[str, Any] = {"recipe": name, "gpu": gpu}
    try:
        _, recipe = load_recipe(name, STEPS)
        hardware = find_hardware(gpu)
        found["simulated"] = peaks(predicted("simulated", recipe, hardware))
        found["emulated"] = peaks(emulated(name, recipe, hardware))
    except InputError as error:
        return found | {"impossible": str(error)}
    if found["simulated"]["fits"] and found["emulated"]["fits"]:
        for what in ("allocated_bytes", "reserved_bytes"):
            found[f"{what}_apart"] = found["simulated"][what] - found["emulated"][what]
    return found


def main() -> int:
    """Exit status: 1 if a recipe has not both answers."""
    parser = parser_of("benchmarks.virtual_gpu.recipes", __doc__)
    parser.add_argument("recipe", nargs="*", default=RECIPES)
    parser.add_argument("--gpu", action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = {"versions": versions_of(LIBRARIES), "changed": list(STEPS)}
    table = GrowingTable(
        options.out, head, lambda each: (each["recipe"], each["gpu"]), same=("versions", "changed")
    )
    for name, gpu in product(options.recipe, options.gpu or GPUS):
        if (name, gpu) not in table.rows:
            table.add(found := row(name, gpu))
            print(found, flush=True)
    return int(any("impossible" in each for each in table.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
