"""A long run: does it hold what it promises for two thousand steps?

Runs a recipe as a user would (`harness run`), watches the process from outside, and reads its log. Three
bars: a line in the log for every step; resident memory in the last tenth of the timed steps within 2 % of
that in the second tenth; and so the cost of a step, within 5 %.

The cost of a step is its processor time over that of a fixed piece of work (soak_reference.py), which another
process does once a second in the same minutes, on a processor of its own where there is one to spare. The
processor time alone would not do: within minutes the speed of a machine drifts by more than the bar, as its
clock does and with what its neighbours do to caches and memory. That is told beside the ratio, and so is the
clock's time of a step: what a user waits, and also what other programs of the machine take.

    python -m benchmarks.soak [RECIPE] [key=value ...] [--steps N] [--out FILE]

The exit status is 1 when a bar is missed.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.soak.reference import Reference, read_references
from harness.system.files import write_whole
from harness.system.versions import provenance

STEPS = 2000
MEMORY_BAR = 0.02
TIME_BAR = 0.05
EVERY_S = 0.25
PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Those of this process, where the system lets one choose."""


class Sample(NamedTuple):
    """What was seen at one moment."""

    at_s: float
    """Of time.monotonic."""
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
        done = Path(folder) / "references.jsonl"
        with _beside([sys.executable, "-m", "benchmarks.soak.__main__.reference", str(done)]):
            samples, status = _watched([sys.executable, "-m", "harness", *arguments], run / "log.jsonl")
        seconds = time.perf_counter() - began
        if status != 0:
            raise SystemExit(f"harness {' '.join(arguments)} ended with status {status}.")
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        profile = json.loads((run / "profile.json").read_bytes())
        references = read_references(done)
    timed = [line for line in lines if line["kind"] == "timed"]
    total = profile["recipe"]["warmup_steps"] + steps + 2
    first, last = timed[0]["step"], timed[-1]["step"]
    within = [sample for sample in samples if first <= sample.steps_done <= last]
    rss_bytes = _tenths([sample.rss_bytes for sample in within])
    step_s = _tenths([line["step_s"] for line in timed])
    cpu_s, reference_s = _cpu_s_by_tenth(within, references)
    ratio = [step / reference for step, reference in zip(cpu_s, reference_s, strict=True)]
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
        "reference_cpu_s_by_tenth": reference_s,
        "reference_cpu_change": reference_s[-1] / reference_s[1] - 1,
        "step_over_reference_by_tenth": ratio,
        "step_over_reference_change": ratio[-1] / ratio[1] - 1,
        "reference_has_its_own_processor": len(PROCESSORS) > 1,
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "leak_found": profile.get("leak"),
        "seconds": seconds,
        "load_average": list(os.getloadavg()),
        "provenance": provenance(),
    }
    return {**figures, "missed": list(_missed(figures))}


@contextmanager
def _beside(command: list[str]) -> Iterator[None]:
    """Run `command` meanwhile, on the last processor."""
    process = subprocess.Popen(command)
    try:
        _keep_to(process.pid, PROCESSORS[-1:])
        yield
    finally:
        process.kill()
        process.wait()


def _keep_to(pid: int, processors: list[int]) -> None:
    if processors:
        psutil.Process(pid).cpu_affinity(processors)


def _watched(command: list[str], log: Path) -> tuple[list[Sample], int]:
    """Run `command`; its resident memory every EVERY_S with the lines that `log` had then, and its status."""
    samples: list[Sample] = []
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            seen = psutil.Process(process.pid)
            _keep_to(process.pid, PROCESSORS[:-1])
            while process.poll() is None:
                done = log.read_bytes().count(b"\n") if log.exists() else 0
                try:
                    with seen.oneshot():
                        times = seen.cpu_times()
                        cpu_s = times.user + times.system
                        samples.append(Sample(time.monotonic(), done, seen.memory_info().rss, cpu_s))
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


def _cpu_s_by_tenth(samples: list[Sample], references: list[Reference]) -> tuple[list[float], list[float]]:
    """Processor seconds of a step, and of the reference work, in each tenth of the steps: the means."""
    first, last = samples[0].steps_done, samples[-1].steps_done
    bounds = [first + (last - first) * tenth / 10 for tenth in range(11)]
    at = [next(sample for sample in samples if sample.steps_done >= bound) for bound in bounds]
    tenths = list(itertools.pairwise(at))
    meanwhile = [
        [done.cpu_s for done in references if start.at_s < done.at_s <= end.at_s] for start, end in tenths
    ]
    if any(start.steps_done == end.steps_done for start, end in tenths) or not all(meanwhile):
        raise SystemExit("too few samples for tenths: more steps, please.")
    steps = [(end.cpu_s - start.cpu_s) / (end.steps_done - start.steps_done) for start, end in tenths]
    return steps, [statistics.fmean(done) for done in meanwhile]


def _missed(figures: dict[str, Any]) -> list[str]:
    bars = {
        "the log lacks a step": figures["log_complete"],
        f"resident memory changed by more than {MEMORY_BAR:.0%}": abs(figures["rss_change"]) <= MEMORY_BAR,
        f"a step's cost changed by more than {TIME_BAR:.0%} of the reference work's": abs(
            figures["step_over_reference_change"]
        )
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
    ref_s, change = figures["reference_cpu_s_by_tenth"], f"{figures['reference_cpu_change']:+.2%}"
    print(f"reference work, processor: {ref_s[1] * 1e3:.1f} ms, then {ref_s[-1] * 1e3:.1f} ms ({change})")
    ratio, change = figures["step_over_reference_by_tenth"], f"{figures['step_over_reference_change']:+.2%}"
    print(f"step over reference work: {ratio[1]:.4f}, then {ratio[-1]:.4f} ({change})")
    print("the log has every step" if figures["log_complete"] else "the log lacks a step")
    if given.out is not None:
        write_whole(given.out, json.dumps(figures, indent=1) + "\n")
    if figures["missed"]:
        raise SystemExit(f"soak: {'; '.join(figures['missed'])}.")


if __name__ == "__main__":
    main()
