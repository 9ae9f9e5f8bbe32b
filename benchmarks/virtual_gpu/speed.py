"""What the virtual GPU costs: the start of a process against the CPU, and a step of a large recipe.

    python -m benchmarks.virtual_gpu.speed [--out FILE]

Ratios within one run, each the median of several processes that take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

START = "import torch; torch.ones(1, device='{}').sum().item()"
STEP = """
import json, resource, time, torch
from harness.measure.observer import Unobserved
from harness.training import run_steps, set_up
from harness.recipe import load_recipe
_, recipe = load_recipe("llama-3.1-8b-lora", [])
device = torch.device("cuda")
training, batches = set_up(recipe, device, Unobserved())
seconds = []
for kind in ("warmup", "warmup", "warmup", "warmup"):
    began = time.perf_counter()
    list(run_steps(training, batches, device, [kind], Unobserved()))
    seconds.append(time.perf_counter() - began)
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"step_s": min(seconds[1:]), "host_rss_bytes": rss}))
"""


def took(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.virtual_gpu.speed", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    emulate = [sys.executable, "-m", "harness", "emulate", "--gpu", "h100", "--"]
    cpu = [sys.executable, "-c", START.format("cpu")]
    virtual = [*emulate, sys.executable, "-c", START.format("cuda")]
    took(virtual)  # compiles what is not in the cache
    pairs = [(took(cpu), took(virtual)) for _ in range(options.runs)]
    on_cpu, on_virtual = (statistics.median(each) for each in zip(*pairs, strict=True))
    done = subprocess.run([*emulate, sys.executable, "-c", STEP], check=True, capture_output=True, text=True)
    found = {
        "start_on_cpu_s": round(on_cpu, 2),
        "start_on_virtual_gpu_s": round(on_virtual, 2),
        "ratio": round(statistics.median(b / a for a, b in pairs), 2),
        "llama-3.1-8b-lora": json.loads(done.stdout.splitlines()[-1]),
    }
    text = json.dumps(found, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
