"""The tables of profiles/README.md that come from profiles/<device>/programme/."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.peers import ratios
from harness.hardware import Calibration
from harness.report.table import markdown_table
from harness.step_profile.step_profile import StepProfile

GIB = 2**30


KERNELS = (
    "Operators that torch.profiler saw launch kernels, each beside its estimate, one step of a recipe: "
    "`python -m benchmarks.time.on_hardware`. The median error is of operators that take 10 us or more."
)


def programme_sections(folder: Path) -> Iterator[str]:
    """Kernels, calibration, the machine around the card, overhead, peers, cases, processes, out of memory,
    and what was not run; those there are."""
    kernels = folder / "kernels.json"
    if kernels.exists():
        yield section("Kernels of a step", f"{KERNELS}\n\n{kernels_table(json.loads(kernels.read_bytes()))}")
    calibration = folder / "calibration.json"
    if calibration.exists():
        fields = json.loads(calibration.read_bytes())
        yield section("Calibration", bullets(f"{name}: {_number(value)}" for name, value in fields.items()))
    programme = {
        path.stem: json.loads(path.read_bytes()) for path in sorted((folder / "programme").glob("*.json"))
    }
    tables = {
        "calibrate": ("The machine around the card", _host),
        "overhead": ("The harness over a bare loop", _overhead),
        "peers": ("The harness over its peers", _peers),
        "cases": ("One field at a time", _cases),
        "processes": ("The step of one recipe in several processes", _processes),
        "oom": ("Out of memory", _out_of_memory),
    }
    for part, (title, made) in tables.items():
        if part in programme and (text := made(programme[part]["results"])):
            yield section(title, text)
    left_out = [
        f"{part}, {result['name']}: {result['status']}{_because(result)}"
        for part, document in programme.items()
        for result in document["results"]
        if result["status"] not in ("ok", "oom")
    ]
    if left_out:
        yield section("Not run, or failed", bullets(left_out))


def section(title: str, text: str) -> str:
    """A part of a device's chapter."""
    return f"### {title}\n\n{text}"


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "".join(f"- {line}\n" for line in lines)


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table, numbers to the right of the first column."""
    return markdown_table(head, body, range(1, len(head)))


def gib(size_bytes: float | None) -> str:
    """Bytes in GiB; more digits for small ones; a dash for unknown."""
    if size_bytes is None:
        return "-"
    return f"{size_bytes / GIB:.3f}" if size_bytes >= GIB / 10 else f"{size_bytes / GIB:.5f}"


def ms(seconds: float | None) -> str:
    """Seconds in ms; a dash for unknown."""
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def percent(fraction: float | None) -> str:
    """A fraction in percent; a dash for unknown."""
    return "-" if fraction is None else f"{fraction:.1%}"


def ratio(value: float | None) -> str:
    """Four digits after the point; a dash for unknown."""
    return "-" if value is None else f"{value:.4f}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _because(result: Mapping[str, Any]) -> str:
    return f", {result['reason']}" if result.get("reason") else ""


def kernels_table(document: Mapping[str, Any]) -> str:
    """What benchmarks.time.on_hardware wrote: of each recipe, and of each kind of kernel."""
    groups = {**document["recipes"], **document["kinds"], "all": document["all"]}
    body = [
        (
            name,
            f"{found['operators']:,}",
            f"{found['measured_ms']:,.1f}",
            f"{found['estimated_ms']:,.1f}",
            ratio(_over(found["estimated_ms"], found["measured_ms"])),
            percent(found["median_error"]),
        )
        for name, found in groups.items()
    ]
    head = ("recipe or kind", "operators", "measured, ms", "estimated, ms", "ratio", "median error")
    return table(head, body)


def _host(results: Iterable[Mapping[str, Any]]) -> str:
    """What a calibration has only for the machine that was measured; empty where it was not measured."""
    done = {result["name"]: result["result"] for result in results if result["status"] == "ok"}
    if "launch" not in done:
        return ""
    launch = done["launch"]
    measured_us, assumed_us = launch["operator_s"] * 1e6, Calibration().host_op_s * 1e6
    otherwise = "unless a calibration says otherwise"
    return bullets(
        [
            f"processor: {launch['processor']}",
            f"an operator in a step: {measured_us:.1f} us; estimates take {assumed_us:.0f} us, {otherwise}",
            f"an operator alone: {launch['alone_s'] * 1e6:.1f} us",
        ]
    )


def _overhead(results: Iterable[Mapping[str, Any]]) -> str:
    rows = [result["result"] for result in results if result["status"] == "ok"]
    body = [
        (
            row["recipe"],
            row["recording"],
            ms(row["harness_median_s"]),
            ms(row["bare_median_s"]),
            ratio(row["ratio"]),
            f"{ratio(row.get('ratio_low'))} to {ratio(row.get('ratio_high'))}",
            ratio(row["bar"]),
        )
        for row in rows
    ]
    return table(
        ("recipe", "recording", "harness, ms", "bare loop, ms", "ratio", "95 % interval", "bar"), body
    )


def _peers(results: Sequence[Mapping[str, Any]]) -> str:
    quantities = ("step_time", "peak_allocated", "peak_reserved")
    body = [
        (row["recipe"], row["contender"], *(ratio(row[name]) for name in quantities))
        for row in ratios(results)
    ]
    head = ("recipe", "against", "step time", "peak allocated", "peak reserved")
    return f"Below 1 the harness needs less.{_spread(results)}\n\n{table(head, body)}"


def _spread(results: Sequence[Mapping[str, Any]]) -> str:
    """How far steps of one run are apart; empty where they are not known one by one."""
    runs = [result["result"]["step_s"] for result in results if "step_s" in result.get("result", {})]
    slowest = [max(seconds) / statistics.median(seconds) - 1 for seconds in runs]
    if not slowest:
        return ""
    return (
        f" The machine's steps vary within a run: the slowest takes {statistics.median(slowest):.0%} longer "
        f"than the median step in the median of {len(slowest)} runs, and {max(slowest):.0%} longer at most."
    )


def _cases(results: Iterable[Mapping[str, Any]]) -> str:
    profiles = {
        result["name"]: StepProfile.model_validate(result["result"]["profile"])
        for result in results
        if result["status"] in ("ok", "oom")
    }
    base = profiles.get("base")
    body = []
    for name, profile in profiles.items():
        speed, peak = profile.step.tokens_per_s, profile.memory.peak_allocated_bytes
        body.append(
            (
                name,
                "out of memory" if profile.oom else ms(profile.step.time_s.median),
                "-" if speed is None else f"{speed:,.0f}",
                ratio(_over(speed, base and base.step.tokens_per_s)),
                gib(peak),
                ratio(_over(peak, base and base.memory.peak_allocated_bytes)),
                percent(profile.step.mfu),
            )
        )
    head = ("case", "step, ms", "tokens/s", "over base", "peak, GiB", "over base", "MFU")
    return table(head, body)


def _processes(results: Iterable[Mapping[str, Any]]) -> str:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if result["status"] == "ok":
            found.setdefault(result["result"]["recipe"], []).append(result["result"])
    body = []
    for name, runs in found.items():
        steps = [run["step_s"] for run in runs]
        operators = ", ".join(f"{run['operator_s'] * 1e6:.1f}" for run in runs)
        body.append((name, ", ".join(map(ms, steps)), ratio(max(steps) / min(steps)), operators))
    head = ("recipe", "median step of each process, ms", "slowest over fastest", "an operator in each, us")
    return table(head, body)


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _out_of_memory(results: Iterable[Mapping[str, Any]]) -> str:
    body = []
    for result in results:
        if result["status"] != "ok":
            continue
        made = result["result"]
        oom = made.get("oom") or {}
        body.append(
            (
                result["name"],
                f"`{' '.join(made['run'])}`",
                str(made.get("exit_status", "-")),
                oom.get("phase", "it fits"),
                gib(oom.get("requested_bytes")),
                gib((made.get("memory") or {}).get("peak_allocated_bytes")),
            )
        )
    return table(("run", "recipe", "exit status", "ran out in", "asking for, GiB", "peak, GiB"), body)
