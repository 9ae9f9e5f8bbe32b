"""The device's time of a step, simulated against emulated: what its kernels take, by kind and by operator.

    python -m benchmarks.virtual_gpu.times [RECIPE ...] [--gpu NAME] [--set FIELD=VALUE ...] [--out FILE]

Takes PyTorch's CUDA build and no GPU. Both answers have the same estimates of kernels; what is compared is
which kernels they see: a simulation follows the model on shapes alone, and the virtual GPU's clock hears
PyTorch's CUDA build launch them. Communication and copies to the host are left out: they are not the device's
own work. Rows that FILE has of the same versions stay, but for those that are made anew.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.answers import emulated, predicted
from harness.errors import InputError
from harness.hardware import find_hardware
from harness.recipe import load_recipe
from harness.system import write_whole

RECIPES = (
    "llama-3.2-1b-bf16",
    "llama-3.1-8b-lora",
    "llama-3.1-8b-qlora",
    "llama-3.2-1b-packing",
    "gpt2-medium-lora",
    "llama-3.2-1b-fp16-mixed",
    "qwen2.5-7b-lora",
    "gemma-2-2b-lora",
)
STEPS = ("steps=2", "warmup_steps=1")
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def row(name: str, gpu: str, overrides: list[str]) -> dict[str, Any]:
    """One recipe: seconds by kind of kernel of both answers, and by how much the whole differs."""
    _, recipe = load_recipe(name, (*STEPS, *overrides))
    hardware = find_hardware(gpu)
    simulated: dict[str, float] = defaultdict(float)
    for phase in predicted("simulated", recipe, hardware).phases.values():
        for kind, seconds in (phase.kernels_s or {}).items():
            simulated[kind] += seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VIRTUAL_GPU_TIMES"] = folder
        emulated(name, recipe, hardware)
        del os.environ["VIRTUAL_GPU_TIMES"]
        (path,) = Path(folder).glob("*-times.json")
        found = json.loads(path.read_text(encoding="utf-8"))
    heard = {kind: s for kind, s in found["kernels_s"].items() if kind != "collective"}
    link = sum(each["time_s"] for each in found["operations"] if each["name"].startswith("copy to the "))
    if link:
        heard["copy"] -= link
    kinds = sorted({*simulated, *heard})
    whole = sum(simulated.values()), sum(heard.values())
    return {
        "recipe": name,
        "set": overrides,
        "gpu": gpu,
        "simulated_s": whole[0],
        "emulated_s": whole[1],
        "apart": whole[1] / whole[0] - 1,
        "kinds": {kind: [simulated.get(kind, 0.0), heard.get(kind, 0.0)] for kind in kinds},
        "unknown_kernels": found["unknown"],
        "kernels": found["calls"],
        "unknown": sorted({each["name"] for each in found["operations"] if each["is_unknown"]}),
    }


def main() -> int:
    """Exit status: 1 if a recipe has not both answers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu.times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="*", default=RECIPES)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    versions = {library: version(library) for library in LIBRARIES}
    rows: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        rows = before["rows"] if before["versions"] == versions else []
    failed = False
    for name in options.recipe:
        try:
            found = row(name, options.gpu, options.set)
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        again = [all(each[key] == found[key] for key in ("recipe", "gpu", "set")) for each in rows]
        if any(again):
            rows[again.index(True)] = found
        else:
            rows.append(found)
        print(
            f"{name}: simulated {found['simulated_s'] * 1e3:.2f} ms, emulated "
            f"{found['emulated_s'] * 1e3:.2f} ms, {found['apart']:+.2%}; {found['unknown_kernels']} of "
            f"{found['kernels']} kernels unknown",
            flush=True,
        )
        for kind, (first, second) in found["kinds"].items():
            print(f"    {kind:14} {first * 1e3:10.3f} {second * 1e3:10.3f} ms")
        if options.out is not None:
            document = {"versions": versions, "rows": rows}
            write_whole(options.out, json.dumps(document, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
