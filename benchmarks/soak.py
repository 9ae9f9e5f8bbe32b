"""A long run: does it hold what it promises for two thousand steps?

Runs a recipe as a user would (`harness run`), watches the process from outside, and reads its log. Three
bars: a line in the log for every step; resident memory in the last tenth of the timed steps within 2 % of
that in the second tenth; and so the processor time of a step, within 5 %. The clock's time of a step is told
beside it: it is what a user waits, and also what other programs of the machine take.

    python -m benchmarks.soak [RECIPE] [key=value ...] [--steps N] [--out FILE]

The exit status is 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from harness.files import write_whole
from harness.provenance import provenance

STEPS = 2000
MEMORY_BAR = 0.02
TIME_BAR = 0.05
EVERY_S = 0.25


class Sample(NamedTuple):
    """What was seen at one moment."""

    steps_done: int
    rss_bytes: int
    cpu_s: float
    """Processor time of the process so far, its threads together."""


def soak(recipe: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Run `recipe` for `steps` timed steps; JSON-able figures, and under `missed` the bars it missed."""
    with tempfile.TemporaryDirectory(prefix="harness-soak-") as folder:
        run = Path(folder) / "run"
        arguments = ["run", recipe, f"steps={steps}", *overrides, "--out", str(run)]
        began = time.perf_counter()
        samples, status = _watched([sys.executable, "-m", "harness", *arguments], run / "log.jsonl")
        seconds = time.perf_counter() - began
        if status != 0:
            raise SystemExit(f"harness {' '.join(arguments)} ended with status {status}.")
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        profile = json.loads((run / "profile.json").read_bytes())
    timed = [line for line in lines if line["kind"] == "timed"]
    total = profile["recipe"]["warmup_steps"] + steps + 2
    first, last = timed[0]["step"], timed[-1]["step"]
    within = [sample for sample in samples if first <= sample.steps_done <= last]
    rss_bytes = _tenths([sample.rss_bytes for sample in within])
    step_s = _tenths([line["step_s"] for line in timed])
    cpu_s = _cpu_s_by_tenth(within)
    figures = {
        "recipe": recipe,
        "overrides": [f"steps={steps}", *overrides],
        "steps_timed": len(timed),
        "log_complete": [line["step"] for line in lines] == list(range(total)) and len(timed) == steps,
        "rss_bytes_by_tenth": rss_bytes,
        "rss_change": rss_bytes[-1] / rss_bytes[1] - 1,
        "step_s_by_tenth": step_s,
        "step_time_change": step_s[-1] / step_s[1] - 1,
        "step_cpu_s_by_tenth": cpu_s,
        "step_cpu_change": cpu_s[-1] / cpu_s[1] - 1,
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "leak_found": profile.get("leak"),
        "seconds": seconds,
        "load_average": list(os.getloadavg()),
        "provenance": provenance(),
    }
    return {**figures, "missed": list(_missed(figures))}


def _watched(command: list[str], log: Path) -> tuple[list[Sample], int]:
    """Run `command`; its resident memory every EVERY_S with the lines that `log` had then, and its status."""
    samples: list[Sample] = []
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            seen = psutil.Process(process.pid)
            while process.poll() is None:
                done = log.read_bytes().count(b"\n") if log.exists() else 0
                try:
                    with seen.oneshot():
                        times = seen.cpu_times()
                        samples.append(Sample(done, seen.memory_info().rss, times.user + times.system))
                except psutil.NoSuchProcess:
                    break
                time.sleep(EVERY_S)
        finally:
            process.terminate()
        status = process.wait()
        if status != 0:
            stderr.seek(0)
            sys.stderr.write(stderr.read().decode(errors="replace")[-2000:])
    return samples, status


def _tenths(values: list[Any]) -> list[float]:
    """The median of each tenth of `values`, in order."""
    bounds = [round(len(values) * tenth / 10) for tenth in range(11)]
    if bounds[1] == 0:
        raise SystemExit("too few samples for tenths: more steps, please.")
    return [statistics.median(values[start:end]) for start, end in itertools.pairwise(bounds)]


def _cpu_s_by_tenth(samples: list[Sample]) -> list[float]:
    """Processor seconds a step in each tenth of the steps."""
    first, last = samples[0].steps_done, samples[-1].steps_done
    bounds = [first + (last - first) * tenth / 10 for tenth in range(11)]
    at = [next(sample for sample in samples if sample.steps_done >= bound) for bound in bounds]
    tenths = list(itertools.pairwise(at))
    if any(start.steps_done == end.steps_done for start, end in tenths):
        raise SystemExit("too few samples for tenths: more steps, please.")
    return [(end.cpu_s - start.cpu_s) / (end.steps_done - start.steps_done) for start, end in tenths]


def _missed(figures: dict[str, Any]) -> list[str]:
    bars = {
        "the log lacks a step": figures["log_complete"],
        f"resident memory changed by more than {MEMORY_BAR:.0%}": abs(figures["rss_change"]) <= MEMORY_BAR,
        f"a step's processor time changed by more than {TIME_BAR:.0%}": abs(figures["step_cpu_change"])
        <= TIME_BAR,
        "a leak was reported": figures["leak_found"] is None,
    }
    return [what for what, held in bars.items() if not held]


def main() -> None:
    """Parse the command line, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="smoke")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    figures = soak(given.recipe, given.overrides, given.steps)
    mib = [size / 2**20 for size in figures["rss_bytes_by_tenth"]]
    print(f"{figures['steps_timed']} steps in {figures['seconds']:.0f} s")
    print(f"resident memory: {mib[1]:.1f} MiB, then {mib[-1]:.1f} MiB ({figures['rss_change']:+.2%})")
    step_s = figures["step_s_by_tenth"]
    change = f"{figures['step_time_change']:+.2%}"
    print(f"step, by the clock: {step_s[1] * 1e3:.1f} ms, then {step_s[-1] * 1e3:.1f} ms ({change})")
    cpu_s, change = figures["step_cpu_s_by_tenth"], f"{figures['step_cpu_change']:+.2%}"
    print(f"step, processor: {cpu_s[1] * 1e3:.1f} ms, then {cpu_s[-1] * 1e3:.1f} ms ({change})")
    print("the log has every step" if figures["log_complete"] else "the log lacks a step")
    if given.out is not None:
        write_whole(given.out, json.dumps(figures, indent=1) + "\n")
    if figures["missed"]:
        raise SystemExit(f"soak: {'; '.join(figures['missed'])}.")


if __name__ == "__main__":
    main()
