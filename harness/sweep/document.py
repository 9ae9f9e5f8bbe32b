"""sweep.json: every number of a sweep, from which its tables and its page are made. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationError

from harness.errors import InputError
from harness.step_profile import Count, Details, Fields, MemoryBreakdown, Quantity
from harness.sweep.cell import Status
from harness.sweep.curves import SweptCurve, curves_of
from harness.sweep.plan import HARDWARE, MOST_CELLS, Kind, Plan, spelled
from harness.sweep.processes import Row
from harness.system import parse_json, provenance, read_whole
from harness.units import in_gib

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 2**26
MAX_VALUES = 2**20


class SweptCell(Fields):
    """A finished cell. What is not known is None."""

    label: str
    """The changes, as one types them on the command line; "base" for none."""
    values: dict[str, Any]
    """The value of every swept field."""
    status: Status
    reason: str | None
    """Why the cell did not end well, in a sentence; None if it did."""
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    peak_phase: str | None = None
    at_peak: MemoryBreakdown | None = None
    capacity_bytes: Count | None = None
    """Memory of the device."""
    step_s: Quantity | None = None
    step_from_s: Quantity | None = None
    """10th percentile of `step_s`: over a measurement's steps, or by the error of such estimates."""
    step_to_s: Quantity | None = None
    """90th percentile."""
    tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    step_parts_s: dict[str, Quantity] = Field(default_factory=dict[str, Quantity], max_length=100)
    """The seconds of each part of a simulated step: classes of kernels, communication, idle."""
    mfu: Quantity | None = None
    bound: Literal["compute", "memory", "host"] | None = None
    seconds: Quantity
    """How long the answer took."""


class Sweep(Fields):
    """A sweep, as far as its cells are finished."""

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    name: str
    """The recipe's name."""
    grid: bool
    hardware: str | None
    base: Details
    """The base recipe with every field; with a grid, without those that are swept."""
    axes: dict[str, list[Any]]
    complete: bool
    """Whether every cell is finished."""
    cells: list[SweptCell] = Field(min_length=1, max_length=MOST_CELLS + 1)
    curves: list[SweptCurve] = Field(max_length=MOST_CELLS + 1)
    provenance: Details

    def to_json(self) -> str:
        """The sweep as an indented JSON document."""
        return self.model_dump_json(indent=1) + "\n"

    @property
    def answers(self) -> list[str]:
        """What the curves show, in sentences, after a warning where the cells cannot be compared."""
        sentences = [curve.answer for curve in self.curves if curve.answer]
        devices = self.provenance.get("devices")
        if isinstance(devices, dict):
            named = cast("dict[str, Any]", devices)
            listed = "; ".join(f"{label} on {device}" for label, device in named.items())
            sentences.insert(0, f"These cells were measured on different devices: {listed}.")
        if best := self.best_for_memory():
            listed = "; ".join(f"{cell.label} ({in_gib(cell.peak_allocated_bytes)})" for cell in best)
            sentences.append(f"The fastest of those that take as little memory, from the smallest: {listed}.")
        return sentences

    def best_for_memory(self) -> list[SweptCell]:
        """The Pareto front of a sweep over several fields: the cells than which no other is faster with as
        little memory, in order of their peak allocated bytes. Empty where it leaves no choice."""
        known = [cell for cell in self.cells if cell.status == "ok" and cell.tokens_per_s]
        known.sort(key=lambda cell: (cell.peak_allocated_bytes or 0, -(cell.tokens_per_s or 0)))
        best: list[SweptCell] = []
        for cell in known:
            if not best or (cell.tokens_per_s or 0) > (best[-1].tokens_per_s or 0):
                best.append(cell)
        return best if len(self.axes) > 1 and 1 < len(best) < len(known) else []

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Read a sweep.json. Raises InputError if it is missing, unreadable or no sweep."""
        try:
            document = parse_json(read_whole(path, MAX_FILE_BYTES), MAX_VALUES)
        except OSError as error:
            raise InputError(f"cannot read the sweep {path}: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}. Give a sweep.json written by harness.") from None
        try:
            sweep = cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{'.'.join(map(str, first['loc'])):.100}"
            raise InputError(f"{path} is no sweep: field {where}: {first['msg']}.") from None
        places = {place for curve in sweep.curves for place in curve.cells}
        if places and not 0 <= min(places) <= max(places) < len(sweep.cells):
            raise InputError(f"{path} is no sweep: a curve goes through a cell that is not there.")
        fields = sweep.axes.keys()
        if not all(cell.values.keys() >= fields for cell in sweep.cells) or not fields >= {
            curve.field for curve in sweep.curves
        }:
            raise InputError(f"{path} is no sweep: a cell or a curve is not about its fields.")
        return sweep


def sweep_of(plan: Plan, rows: Sequence[Row]) -> Sweep:
    """The document of the finished cells."""
    return Sweep(
        kind=plan.kind,
        name=plan.name,
        grid=plan.grid,
        hardware=plan.hardware,
        base=plan.base,
        axes=plan.axes,
        complete=len(rows) == len(plan.cells),
        cells=[_swept(plan, row) for row in rows],
        curves=curves_of(plan, rows),
        provenance={**provenance(), **_devices(plan, rows)},
    )


def _devices(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """The device of each measured cell by label, where an engine chose different ones."""
    profiles = {_label(plan, row): row.outcome.profile for row in rows}
    found = {label: profile.hardware.name for label, profile in profiles.items() if profile is not None}
    several = plan.kind == "measured" and len(set(found.values())) > 1
    return {"devices": found} if several else {}


def _swept(plan: Plan, row: Row) -> SweptCell:
    profile, fields = row.outcome.profile, {**plan.base, HARDWARE: plan.hardware, **row.cell.changes}
    cell = SweptCell(
        label=_label(plan, row),
        values={name: fields[name] for name in plan.axes},
        status=row.outcome.status,
        reason=row.outcome.reason,
        seconds=row.outcome.seconds,
    )
    if profile is not None:
        memory, step = profile.memory, profile.step
        cell.peak_allocated_bytes = memory.peak_allocated_bytes
        cell.peak_reserved_bytes = memory.peak_reserved_bytes
        cell.peak_phase, cell.at_peak = memory.peak_phase, memory.at_peak
        cell.capacity_bytes = profile.hardware.memory_bytes
        cell.step_s, cell.tokens_per_s = step.time_s.median, step.tokens_per_s
        cell.step_from_s, cell.step_to_s = step.time_s.p10, step.time_s.p90
        cell.step_parts_s = profile.parts_of_time_s()
        cell.mfu, cell.bound = step.mfu, step.bound
    return cell


def _label(plan: Plan, row: Row) -> str:
    """A cell's changes; for the base, where only one field is swept, the value of that field."""
    if row.cell.changes or len(plan.axes) > 1:
        return row.cell.label
    (name,) = plan.axes
    return f"{name}={spelled({**plan.base, HARDWARE: plan.hardware}[name])} (base)"
