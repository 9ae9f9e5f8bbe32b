"""The tables of profiles/README.md that come from profiles/<device>/programme/."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.peers import ratios
from harness.report.table import markdown_table
from harness.step_profile.step_profile import StepProfile

GIB = 2**30


def programme_sections(folder: Path) -> Iterator[str]:
    """Calibration, overhead, peers, cases, out of memory, and what was not run; those there are."""
    calibration = folder / "calibration.json"
    if calibration.exists():
        fields = json.loads(calibration.read_bytes())
        yield section("Calibration", bullets(f"{name}: {_number(value)}" for name, value in fields.items()))
    programme = {
        path.stem: json.loads(path.read_bytes()) for path in sorted((folder / "programme").glob("*.json"))
    }
    tables = {
        "overhead": ("The harness over a bare loop", _overhead),
        "peers": ("The harness over its peers", _peers),
        "cases": ("One field at a time", _cases),
        "oom": ("Out of memory", _out_of_memory),
    }
    for part, (title, made) in tables.items():
        if part in programme:
            yield section(title, made(programme[part]["results"]))
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


def _overhead(results: Iterable[Mapping[str, Any]]) -> str:
    rows = [result["result"] for result in results if result["status"] == "ok"]
    body = [
        (
            row["recipe"],
            row["recording"],
            ms(row["harness_median_s"]),
            ms(row["bare_median_s"]),
            ratio(row["ratio"]),
            ratio(row["bar"]),
        )
        for row in rows
    ]
    return table(("recipe", "recording", "harness, ms", "bare loop, ms", "ratio", "bar"), body)


def _peers(results: Iterable[Mapping[str, Any]]) -> str:
    quantities = ("step_time", "peak_allocated", "peak_reserved")
    body = [
        (row["recipe"], row["contender"], *(ratio(row[name]) for name in quantities))
        for row in ratios(results)
    ]
    head = ("recipe", "against", "step time", "peak allocated", "peak reserved")
    return f"Below 1 the harness needs less.\n\n{table(head, body)}"


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
