"""The tables of one profile: totals, phases, memory at the peak, modules, the recipe and provenance."""

import json
from typing import Any

from harness.report.table import Cell, Table, Unit
from harness.step_profile import MEMORY_KINDS, PHASES, StepProfile
from harness.system import is_object


def profile_tables(profile: StepProfile) -> dict[str, Table]:
    """The tables of a profile by name; a table without rows is left out."""
    at_peak = profile.memory.at_peak_by_module or {}
    modules = [(Cell(path), Cell(size, "bytes")) for path, size in at_peak.items()]
    tables = {
        "summary": summary_table(profile),
        "phases": phase_table(profile),
        "memory": memory_table(profile),
        "modules": Table("Memory at the peak by module", ("module", "bytes"), modules),
        "recipe": Table("Recipe, every field", ("field", "value"), _pairs(profile.recipe or {})),
        "provenance": Table("Provenance", ("what", "value"), _pairs(_flat(profile.provenance))),
    }
    return {name: table for name, table in tables.items() if table.rows}


def summary_table(profile: StepProfile) -> Table:
    """The totals of a profile, unknown ones left out."""
    memory, step, device = profile.memory, profile.step, profile.hardware
    rows: list[tuple[str, Any, Unit]] = [
        ("peak allocated", memory.peak_allocated_bytes, "bytes"),
        ("peak reserved", memory.peak_reserved_bytes, "bytes"),
        ("reserved but not allocated, at the peak of reserved", memory.fragmentation_bytes, "bytes"),
        ("process on the device", memory.process_bytes, "bytes"),
        ("device memory", device.memory_bytes, "bytes"),
        ("setup peak", memory.setup_peak_allocated_bytes, "bytes"),
        ("first step peak", memory.first_step_peak_allocated_bytes, "bytes"),
        ("pinned or offloaded on the host", memory.host_bytes, "bytes"),
        ("process on the host", step.host_rss_bytes, "bytes"),
        ("step time, median", step.time_s.median, "s"),
        ("step time, 10th percentile", step.time_s.p10, "s"),
        ("step time, 90th percentile", step.time_s.p90, "s"),
        ("tokens per second", step.tokens_per_s, "number"),
        ("FLOPs of the model, forward and backward", step.model_flops, "flops"),
        ("MFU", step.mfu, "share"),
        ("HFU", step.hfu, "share"),
        ("GPU busy", step.gpu_utilization, "share"),
        ("loss of the last step", step.loss[-1] if step.loss else None, "number"),
    ]
    known = [(Cell(name), Cell(value, unit)) for name, value, unit in rows if value is not None]
    return Table("Totals", ("quantity", "value"), known, notes=[f"Memory is {MEMORY_KINDS[memory.kind]}."])


def phase_table(profile: StepProfile) -> Table:
    """One step by phase."""
    columns = (
        "phase",
        "time, median",
        "p10",
        "p90",
        "share",
        "peak allocated",
        "peak reserved",
        "at end",
        "FLOPs",
    )
    total = sum(profile.phases[name].time_s.median or 0 for name in PHASES if name in profile.phases)
    rows: list[tuple[Cell, ...]] = []
    for name in profile.phase_names():
        stats = profile.phases[name]
        time = stats.time_s
        share = time.median / total if time.median is not None and total and name in PHASES else None
        seconds = (Cell(value, "s") for value in (time.median, time.p10, time.p90))
        sizes = (stats.peak_allocated_bytes, stats.peak_reserved_bytes, stats.allocated_at_end_bytes)
        in_bytes = (Cell(size, "bytes") for size in sizes)
        rows.append((Cell(name), *seconds, Cell(share, "share"), *in_bytes, Cell(stats.flops, "flops")))
    return Table("One step by phase", columns, rows)


def memory_table(profile: StepProfile) -> Table:
    """The bytes at the peak by category."""
    at_peak = profile.memory.at_peak
    total = at_peak.total_bytes()
    rows = [
        (Cell(name), Cell(size, "bytes"), Cell(size / total if total else None, "share"))
        for name, size in at_peak.by_category().items()
        if size is not None
    ]
    return Table("Memory at the peak by category", ("category", "bytes", "share"), rows)


def _pairs(values: dict[str, Any]) -> list[Any]:
    return [(Cell(name), Cell("null" if value is None else as_text(value))) for name, value in values.items()]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by their paths, as in versions.torch."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if is_object(value):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def as_text(value: Any) -> str | None:
    """A field's value as JSON spells it, but text and None as they are."""
    return value if isinstance(value, str) or value is None else json.dumps(value)
