"""What the virtual GPU's clock costs: the start of a process and a step, with it over without it.

    python -m benchmarks.virtual_gpu.clock_cost [RECIPE] [--pairs N] [--steps N] [--out FILE]

Seconds of processors. Of each pair of processes, one with the clock and one without, the starts come one
after the other, and the steps take turns: a machine that other programs slow down slows both. Of each
process the step counts that a tenth of its steps is faster than; told are the middle of all pairs' ratios,
and the smallest and largest. It takes many pairs: even two processes without the clock, forked from one, were
2 % apart.
"""

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.system import write_whole

START = "import torch; torch.ones(1, device='cuda').sum().item()"
STEPS = """
import sys, time, torch
from harness.measure.observer import Unobserved
from harness.training import run_steps, set_up
from harness.recipe import load_recipe
_, recipe = load_recipe(sys.argv[1], [])
device = torch.device("cuda")
training, batches = set_up(recipe, device, Unobserved())
for _ in sys.stdin:
    began = time.process_time()
    list(run_steps(training, batches, device, ["warmup"], Unobserved()))
    print("step", time.process_time() - began, flush=True)
"""
WARM_UP = 4
"""Steps of each process that are not counted."""


def command(clock: bool, code: str, *arguments: str) -> list[str]:
    emulate = [sys.executable, "-m", "harness", "emulate", "--gpu", "h100"]
    return [*emulate, "--clock" if clock else "--no-clock", "--", sys.executable, "-c", code, *arguments]


def start_s(clock: bool) -> float:
    """Seconds of processors that a process takes which uses the device once."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command(clock, START), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def steps_s(recipe: str, count: int) -> tuple[float, float]:
    """Seconds of processors that a step takes with the clock and without: a tenth of `count` are faster."""
    processes = [
        subprocess.Popen(
            command(clock, STEPS, recipe),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for clock in (True, False)
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(WARM_UP + count):
        for process, found in zip(processes, seconds, strict=True):
            found.append(one_step_s(process))
    for process in processes:
        process.communicate()
    with_clock, without = (sorted(found[WARM_UP:])[count // 10] for found in seconds)
    return with_clock, without


def one_step_s(process: subprocess.Popen[str]) -> float:
    """Seconds of processors that the next step of this process takes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("step "):
            return float(line.split()[1])
    sys.exit("A process ended before its step. See why: harness run RECIPE --gpu h100")


def ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    each = [with_clock / without for with_clock, without in pairs]
    return {
        "without_s": statistics.median(without for _, without in pairs),
        "ratio": {"middle": statistics.median(each), "smallest": min(each), "largest": max(each)},
    }


def main() -> None:
    parser = parser_of("benchmarks.virtual_gpu.clock_cost", __doc__)
    parser.add_argument("recipe", nargs="?", default="llama-3.1-8b-lora")
    parser.add_argument("--pairs", type=int, default=20, help="of processes; 20 if left out")
    parser.add_argument("--steps", type=int, default=12, help="of each process; 12 if left out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start_s(True)  # compiles what is not in the cache
    starts = [(start_s(True), start_s(False)) for _ in range(options.pairs)]
    steps = [steps_s(options.recipe, options.steps) for _ in range(options.pairs)]
    found = {
        "recipe": options.recipe,
        "pairs": options.pairs,
        "steps": options.steps,
        "start": ratios(starts),
        "step": ratios(steps),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        write_whole(options.out, text + "\n")


if __name__ == "__main__":
    main()
