"""What the host takes for what it does in a step, fitted to steps on the virtual GPU.

    python -m benchmarks.time.host --out FILE
    python -m benchmarks.time.host --traces FOLDER --out FILE

Each step runs as PyTorch's own code on this machine's processor, without the virtual GPU's clock and without
the values that it computes, so that nothing but the program takes time. A simulation of the same recipe
counts operators and Python calls. Writes the part "host" of harness/kernel_time/parameters.json, and to FILE
how far off each phase of each recipe is. Needs `make .venv-virtual-gpu/.installed`, and a machine that does
nothing else.

There, driver and cuBLAS take no time. What they take on a GPU's machine, its traces tell (those that part
"profile" of benchmarks.gpu_programme writes): with --traces, the medians of each trace go to FILE, which is
profiles/h100/host_calls.json for the fit. A call that waits for a full queue takes longer, and so does a
machine that is busy: the trace with the shortest calls counts.
"""

import gc
import gzip
import json
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import parser_of
from benchmarks.gpu_programme.calibrate import HOST_BOUND, OperatorCount
from benchmarks.time.residuals import residuals
from harness.allocator import Settings
from harness.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.kernel_time.host import HostTimes
from harness.kernel_time.parameters import FILE
from harness.kernels import Cost
from harness.measure.cpu import cpu_name
from harness.measure.observer import Unobserved
from harness.recipe import Recipe, load_recipe
from harness.simulate import simulate
from harness.simulate.clock import NOTHING, SimulatedTime
from harness.system import write_whole
from harness.system.locations import profiles_folder
from harness.training import run_steps, set_up

PHASES = ("forward", "backward", "optimizer_step")
HOST_BOUND_NAME = "host-bound"
"""The step whose mean time an operator is `host_op_s` of a calibration."""
FITTED = (
    HOST_BOUND_NAME,
    "gpt2-medium-lora",
    "llama-3.1-8b-full-bf16-in-backward",
    "llama-3.1-8b-lora",
    "llama-3.1-8b-qlora",
    "llama-3.2-1b-bf16",
    "llama-3.2-1b-fp16-mixed",
    "llama-3.2-1b-fused-linear",
    "llama-3.2-1b-ia3",
)
ASIDE = (
    "gemma-2-2b-lora",
    "llama-3.1-8b-full-bf16",
    "llama-3.2-1b-bf16-mixed",
    "llama-3.2-1b-packing",
    "mistral-7b-qlora",
    "qwen2.5-7b-lora",
    "tinyllama-lora",
)
"""Recipes that nothing is fitted to."""
FITTED_TIMES = [name for name in HostTimes._fields if name != "product"]
CALLS = profiles_folder() / "h100" / "host_calls.json"
WARM_UP, STEPS = 2, 8
SHORTEST_S = 1e-3
"""A phase that takes less is left out."""


def recipe_of(name: str) -> Recipe:
    return Recipe(**HOST_BOUND) if name == HOST_BOUND_NAME else load_recipe(name, [])[1]


class _Phases(Unobserved):
    """Seconds of processors that each phase of a step takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] += time.process_time() - began


def measure(name: str) -> dict[str, Any]:
    """The fastest of some steps, phase by phase, and the operators of a step. Runs on a virtual GPU."""
    device, recipe = torch.device("cuda"), recipe_of(name)
    training, batches = set_up(recipe, device, Unobserved())

    def step(observer: Unobserved) -> None:
        gc.collect()
        list(run_steps(training, batches, device, ["warmup"], observer))

    for _ in range(WARM_UP):
        step(Unobserved())
    found = []
    for _ in range(STEPS):
        phases = _Phases()
        step(phases)
        found.append(phases.seconds)
    counted = OperatorCount("cuda")
    with counted.mode():
        step(Unobserved())
    fastest = {phase: min(seconds[phase] for seconds in found) for phase in found[0]}
    return {"seconds": fastest, "operators": counted.operators}


class _Counts(SimulatedTime):
    """A clock of a host with a device that takes no time, for which one thing of HostTimes takes a second."""

    def __init__(self, what: str) -> None:
        super().__init__(find_hardware("h100"))
        self._host = HostTimes(**{name: float(name == what) for name in HostTimes._fields})

    def launch(self, cost: Cost, *_: Any, **__: Any) -> None:
        self._host_s += self._host.operator if cost is NOTHING else self._host.launch
        if cost.kind == "product":
            self._host_s += self._host.product


def counts(name: str) -> dict[str, list[float]]:
    """By phase: how many there are of each of HostTimes."""
    clocks = [_Counts(what) for what in HostTimes._fields]
    device = with_memory(find_hardware("h100"), PLENTY_BYTES)
    simulate(recipe_of(name), device, Settings(), explain_oom=False, repeat=False, beside=clocks)
    return {phase: [clock.taken_s.get(phase, 0.0) for clock in clocks] for phase in PHASES}


def _measured(name: str) -> dict[str, Any]:
    """`measure` in a process with a virtual GPU."""
    emulate = [sys.executable, "-m", "harness", "emulate", "--gpu", "h100", "--no-clock", "--no-values"]
    command = [*emulate, "--", sys.executable, "-m", "benchmarks.time.host", "--measure", name]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^measured (.*)$", run.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"{name} was not measured:\n{run.stdout}\n{run.stderr}")
    return json.loads(found[1])


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each of FITTED_TIMES, none below 0: least squares of the relative errors."""
    live = [*range(len(FITTED_TIMES))]
    while True:
        each = np.array([[row["counts"][place] / row["seconds"] for place in live] for row in rows])
        found, *_ = np.linalg.lstsq(each, np.ones(len(rows)), rcond=None)
        if (found >= 0).all():
            break
        live = [place for place, value in zip(live, found, strict=True) if value > 0]
    us = dict.fromkeys(FITTED_TIMES, 0.0)
    us |= {FITTED_TIMES[place]: value * 1e6 for place, value in zip(live, found, strict=True)}
    return {f"{name}_us": round(float(value), 3) for name, value in us.items()}


def calls_of(trace: Path) -> dict[str, float]:
    """Of a trace, medians in microseconds: of a kernel's launch; by how much longer `mm` takes than `mul`
    without their launches; and of a transposition, which knows of no device."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    threads: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver"):
            threads[event["tid"]].append(event)
    launches: list[float] = []
    views: list[float] = []
    within: dict[str, list[float]] = {"aten::mm": [], "aten::mul": []}
    for each in threads.values():
        each.sort(key=lambda event: (event["ts"], -event["dur"]))
        for place, event in enumerate(each):
            if event["name"] == "cudaLaunchKernel":
                launches.append(event["dur"])
            if event["name"] == "aten::transpose":
                views.append(event["dur"])
            if event["name"] in within:
                ends, left = event["ts"] + event["dur"], event["dur"]
                for inner in each[place + 1 :]:
                    if inner["ts"] >= ends:
                        break
                    left -= inner["dur"] * (inner["cat"] != "cpu_op")
                within[event["name"]].append(left)
    of_mm, of_mul = (statistics.median(found) for found in within.values())
    medians = {"launch": statistics.median(launches), "product": of_mm - of_mul}
    medians["transpose"] = statistics.median(views)
    return {f"{name}_us": round(value, 2) for name, value in medians.items()}


def _errors(rows: list[dict[str, Any]], estimated: list[float]) -> dict[str, Any]:
    return residuals([row["seconds"] for row in rows], estimated)


def main() -> None:
    parser = parser_of("benchmarks.time.host", __doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", metavar="FOLDER", type=Path, help="traces of a GPU's machine")
    parser.add_argument("--measure", metavar="RECIPE", help="in a process with a virtual GPU: one recipe")
    options = parser.parse_args()
    if options.measure:
        print("measured", json.dumps(measure(options.measure)), flush=True)
        return
    if options.traces:
        if options.out is None:
            parser.error("--traces needs --out, the file to write.")
        found = {path.name.partition(".json")[0]: calls_of(path) for path in options.traces.glob("*.json.gz")}
        write_whole(options.out, json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        return
    traces = json.loads(CALLS.read_text(encoding="utf-8")).values()
    on_gpu = min(traces, key=lambda found: found["launch_us"])
    rows: list[dict[str, Any]] = []
    fitted = {"driver_us": on_gpu["launch_us"], "product_us": on_gpu["product_us"]}
    for name in (*FITTED, *ASIDE):
        found, counted = _measured(name), counts(name)
        if name == HOST_BOUND_NAME:
            launches, *_, products = map(sum, zip(*counted.values(), strict=True))
            us = sum(found["seconds"].values()) * 1e6
            us += launches * fitted["driver_us"] + products * fitted["product_us"]
            fitted["mean_us"] = round(us / found["operators"], 3)
        for phase in PHASES:
            seconds = found["seconds"].get(phase, 0.0)
            if seconds > SHORTEST_S:
                rows.append({"recipe": name, "phase": phase, "seconds": seconds, "counts": counted[phase]})
        print(name, found["seconds"], counted, flush=True)
    of_fit = [row for row in rows if row["recipe"] in FITTED]
    aside = [row for row in rows if row["recipe"] in ASIDE]
    fitted |= fit(of_fit)
    us = [fitted[f"{name}_us"] for name in FITTED_TIMES]
    for row in rows:
        row["estimated"] = sum(each * number for each, number in zip(us, row["counts"], strict=False)) * 1e-6
    alone_s = sum(row["seconds"] for row in of_fit) / sum(row["counts"][0] for row in of_fit)
    found = {
        "processor": cpu_name(),
        "parameters": fitted,
        "fitted": _errors(of_fit, [row["estimated"] for row in of_fit]),
        "aside": _errors(aside, [row["estimated"] for row in aside]),
        "aside_by_launches_alone": _errors(aside, [row["counts"][0] * alone_s for row in aside]),
        "rows": rows,
    }
    print(json.dumps({**found, "rows": len(rows)}, indent=1))
    if options.out is not None:
        document = json.loads(FILE.read_text(encoding="utf-8"))
        document["host"] |= fitted  # beside what benchmarks/time/slow_hosts.py has written
        write_whole(FILE, json.dumps(document, indent=1, sort_keys=True) + "\n")
        write_whole(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
