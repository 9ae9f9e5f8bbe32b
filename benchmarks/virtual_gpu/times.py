"""The device's time of a step, simulated against emulated: what its kernels take, by kind and by operator.

    python -m benchmarks.virtual_gpu.times [RECIPE ...] [--gpu NAME] [--set FIELD=VALUE ...] [--out FILE]

Takes PyTorch's CUDA build and no GPU. Both answers have the same estimates of kernels; what is compared is
which kernels they see: a simulation follows the model on shapes alone, and the virtual GPU's clock hears
PyTorch's CUDA build launch them. Communication and copies to the host are left out: they are not the device's
own work. Rows that FILE has of the same versions stay, but for those that are made anew.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.command import GrowingTable, parser_of, versions_of
from benchmarks.virtual_gpu.recipes import IN_BACKWARD, LIBRARIES, RECIPES, STEPS
from harness.answers import emulated, predicted
from harness.errors import InputError
from harness.hardware import find_hardware
from harness.recipe import load_recipe

TIMED = tuple(name for name in RECIPES if name != IN_BACKWARD)


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
    parser = parser_of("benchmarks.virtual_gpu.times", __doc__)
    parser.add_argument("recipe", nargs="*", default=TIMED)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = {"versions": versions_of(LIBRARIES)}
    table = GrowingTable(options.out, head, lambda each: (each["recipe"], each["gpu"], *each["set"]))
    failed = False
    for name in options.recipe:
        try:
            found = row(name, options.gpu, options.set)
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        table.add(found)
        print(
            f"{name}: simulated {found['simulated_s'] * 1e3:.2f} ms, emulated "
            f"{found['emulated_s'] * 1e3:.2f} ms, {found['apart']:+.2%}; {found['unknown_kernels']} of "
            f"{found['kernels']} kernels unknown",
            flush=True,
        )
        for kind, (first, second) in found["kinds"].items():
            print(f"    {kind:14} {first * 1e3:10.3f} {second * 1e3:10.3f} ms")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
