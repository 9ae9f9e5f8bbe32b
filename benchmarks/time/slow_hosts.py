"""How many times as long as the host of harness/kernel_time other machines' hosts take for a step.

    python -m benchmarks.time.slow_hosts --out FILE

Each recipe that was measured on a card (profiles/<card>/*.measured.json) is simulated. Where a forward or a
backward took much longer than the kernels explain, the host was what it waited for, and what it took over
what the simulated host works is how slow that machine's host was. Writes the 90th percentile of all such
phases as "slow" of the part "host" of harness/kernel_time/parameters.json, and to FILE every phase.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import parser_of
from benchmarks.time import CARDS
from harness.allocator import Settings
from harness.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.kernel_time.parameters import FILE
from harness.recipe import Recipe
from harness.simulate import simulate
from harness.simulate.clock import SimulatedTime
from harness.step_profile.step_profile import StepProfile
from harness.system import write_whole
from harness.system.locations import profiles_folder

PHASES = ("forward", "backward")
PERCENTILE = 90
LONGER = 1.25
"""How many times as long as the kernels, at their 90th percentile, a phase took that waited for the host."""


def phases_of(path: Path) -> list[dict[str, Any]]:
    """What each phase of one measured profile took, beside its kernels and the work of the simulated host."""
    measured = StepProfile.read(path)
    if measured.oom is not None or measured.recipe["quantization"] == "int8" or measured.recipe["offload"]:
        return []  # values decide about the outliers of an int8 product, and the link is waited for
    hardware = find_hardware(path.parent.name)
    clock = SimulatedTime(hardware)
    recipe = Recipe(**measured.recipe)
    plenty = with_memory(hardware, PLENTY_BYTES)
    simulate(recipe, plenty, Settings(), explain_oom=False, repeat=False, beside=[clock])
    found = []
    for phase in PHASES:
        took_s = measured.phases[phase].time_s.median
        if took_s is not None:
            _, kernels_s = clock.kernels_range_s(phase, sum(clock.kernels_s[phase].values()))
            row = {
                "device": hardware.name,
                "recipe": path.name.removesuffix(".measured.json"),
                "phase": phase,
            }
            times = {"measured_s": took_s, "kernels_s": kernels_s, "host_s": clock.host_works_s[phase]}
            found.append(row | times)
    return found


def main() -> None:
    parser = parser_of("benchmarks.time.slow_hosts", __doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for card in CARDS:
        for path in sorted((profiles_folder() / card).glob("*.measured.json")):
            rows += phases_of(path)
            print(rows[-1], flush=True)
    waited = [row for row in rows if row["measured_s"] > LONGER * row["kernels_s"]]
    ratios = [row["measured_s"] / row["host_s"] for row in waited]
    found = {
        "slow": round(float(np.percentile(ratios, PERCENTILE)), 2),
        "median": round(float(np.median(ratios)), 2),
        "phases_that_waited": len(waited),
        "phases": len(rows),
        "rows": rows,
    }
    print({name: value for name, value in found.items() if name != "rows"})
    document = json.loads(FILE.read_text(encoding="utf-8"))
    document["host"]["slow"] = found["slow"]
    write_whole(FILE, json.dumps(document, indent=1, sort_keys=True) + "\n")
    write_whole(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
