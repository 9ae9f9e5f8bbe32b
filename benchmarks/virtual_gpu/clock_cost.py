"""What the virtual GPU's clock costs: the start of a process and a step, with it over without it.

    python -m benchmarks.virtual_gpu.clock_cost [RECIPE] [--pairs N] [--out FILE]

Seconds of processors, in processes that take turns: with the clock, without, with, and so on. Of each, the
shortest of ten steps; told are the middle of all pairs' ratios, and the smallest and largest.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.system import write_whole

START = "import torch; torch.ones(1, device='cuda').sum().item()"
STEP = """
import gc, sys, time, torch
from harness.measure.observer import Unobserved
from harness.training import run_steps, set_up
from harness.recipe import load_recipe
_, recipe = load_recipe(sys.argv[1], [])
device = torch.device("cuda")
training, batches = set_up(recipe, device, Unobserved())
seconds = []
for kind in ["warmup"] * 13:
    gc.collect()
    began = time.process_time()
    list(run_steps(training, batches, device, [kind], Unobserved()))
    seconds.append(time.process_time() - began)
print(min(seconds[3:]))
"""


def seconds_of(clock: bool, code: str, *arguments: str) -> tuple[float, str]:
    """Of processors, and the last line that was printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "harness", "emulate", "--gpu", "h100"]
    command += ["--clock" if clock else "--no-clock", "--", sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, (done.stdout.splitlines() or [""])[-1]


def ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    each = [with_clock / without for with_clock, without in pairs]
    return {
        "without_s": statistics.median(without for _, without in pairs),
        "ratio": {"middle": statistics.median(each), "smallest": min(each), "largest": max(each)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu.clock_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", default="llama-3.1-8b-lora")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seconds_of(True, START)  # compiles what is not in the cache
    starts: list[tuple[float, float]] = []
    steps: list[tuple[float, float]] = []
    for _ in range(options.pairs):
        starts.append((seconds_of(True, START)[0], seconds_of(False, START)[0]))
        first, second = (float(seconds_of(clock, STEP, options.recipe)[1]) for clock in (True, False))
        steps.append((first, second))
    found = {"recipe": options.recipe, "pairs": options.pairs, "start": ratios(starts), "step": ratios(steps)}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        write_whole(options.out, text + "\n")


if __name__ == "__main__":
    main()
