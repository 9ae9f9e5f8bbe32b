"""The answers side by side: what each says about every component and phase, and what is unexplained.

The reference is the measured profile where there is one, else the emulated, else the simulated one. Imports
no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from harness.errors import InputError
from harness.recipe import EFFECTS, Recipe
from harness.step_profile import PHASES, PhaseStats, StepProfile
from harness.units import in_gib

SOURCES = ("napkin", "simulated", "emulated", "measured")
Unit = Literal["bytes", "s", "flops"]


@dataclass(frozen=True)
class Row:
    """One quantity in all the answers."""

    place: str
    """`total`, `at peak`, `step`, or a phase."""
    name: str
    unit: Unit
    values: dict[str, float | None]
    """By source. None: that answer does not know it, or was not asked."""
    reference: str
    """Whose value the others are measured against."""
    comparable: bool = True
    """False for times on different devices."""

    def ratio(self, source: str) -> float | None:
        """The source's value over the reference's."""
        value, true = self.values.get(source), self.values.get(self.reference)
        return value / true if self.comparable and value is not None and true else None

    def unexplained(self, source: str) -> float | None:
        """The reference's value minus the source's, in `unit`."""
        value, true = self.values.get(source), self.values.get(self.reference)
        return true - value if self.comparable and value is not None and true is not None else None


@dataclass(frozen=True)
class Comparison:
    """What the answers about one recipe on one device say, row by row."""

    name: str
    hardware: str
    reference: str
    predictions: tuple[str, ...]
    """The sources that are held against the reference."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """What a reader has to know to judge the numbers."""

    def peak(self) -> Row:
        """The row that a tolerance applies to: peak allocated."""
        return self.rows[0]

    def unexplained_by_category(self, source: str) -> dict[str, float]:
        """Reference minus `source` at the peak, in bytes, of every category that is not the same."""
        rows = {row.name: row.unexplained(source) for row in self.rows if row.place == "at peak"}
        return {name: size for name, size in rows.items() if size}

    def unexplained_by_phase(self, source: str) -> dict[str, float]:
        """Reference minus `source` in bytes, of every phase whose peak is not the same."""
        rows = {row.place: row.unexplained(source) for row in self.rows if row.name == "peak"}
        return {name: size for name, size in rows.items() if size}

    def beyond(self, tolerance: float) -> list[str]:
        """The predictions whose peak allocated is off by more than the fraction `tolerance`, or missing."""
        peak = self.peak()
        true = peak.values.get(self.reference)

        def is_beyond(value: float | None) -> bool:
            if value is None or true is None:  # both out of memory is agreement
                return (value is None) != (true is None)
            return abs(value - true) > tolerance * true

        return [source for source in self.predictions if is_beyond(peak.values.get(source))]

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "name": self.name,
            "hardware": self.hardware,
            "reference": self.reference,
            "rows": [
                {
                    "place": row.place,
                    "name": row.name,
                    "unit": row.unit,
                    **{source: row.values.get(source) for source in SOURCES},
                    "ratio": {source: row.ratio(source) for source in self.predictions},
                    "unexplained": {source: row.unexplained(source) for source in self.predictions},
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }


def compare(profiles: Sequence[StepProfile], name: str = "recipe") -> Comparison:
    """Put the profiles of one recipe side by side.

    Raises InputError when two have the same source, when they are of different recipes, or when there is
    nothing to hold a prediction against.
    """
    by_source: dict[str, StepProfile] = {}
    for profile in profiles:
        if profile.source in by_source:
            raise InputError(f"{name}: there are two {profile.source} profiles. Give one of each source.")
        by_source[profile.source] = profile
    first, *others = profiles
    for other in others:
        fields = different_fields(first.recipe or {}, other.recipe or {})
        if fields:
            raise InputError(
                f"{name}: the {first.source} and the {other.source} profile are of different recipes: "
                f"{described(fields)}. Compare profiles of one recipe."
            )
    reference: str = next((source for source in SOURCES[:0:-1] if source in by_source), "simulated")
    predictions = tuple(source for source in SOURCES if source in by_source and source != reference)
    if reference not in by_source or not predictions:
        raise InputError(f"{name}: there is only a {first.source} profile, and nothing to hold it against.")
    same_device = len({profile.hardware.kind == "cpu" for profile in profiles}) == 1
    known = {source: quantities(profile) for source, profile in by_source.items()}
    rows: list[Row] = []
    for place, quantity, unit in known[reference]:
        values = {source: found[place, quantity, unit] for source, found in known.items()}
        if not rows or any(value is not None for value in values.values()):
            rows.append(Row(place, quantity, unit, values, reference, unit != "s" or same_device))
    return Comparison(
        name=name,
        hardware=by_source[reference].hardware.name,
        reference=reference,
        predictions=predictions,
        rows=tuple(rows),
        notes=tuple(_notes(by_source)),
    )


def different_fields(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The recipe fields that matter to memory and time and differ, with both values.

    A profile older than a field has what the field's default says.
    """
    names = [name for name in {**one, **other} if name not in EFFECTS]
    pairs = {name: (one.get(name, _default(name)), other.get(name, _default(name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _default(name: str) -> Any:
    """A recipe field's default as JSON has it; None for what is no field."""
    default: Any = Recipe.model_fields[name].default if name in Recipe.model_fields else None
    return list(cast("tuple[str, ...]", default)) if isinstance(default, tuple) else default


def described(fields: dict[str, tuple[Any, Any]]) -> str:
    """ "seq_len is 2048 and 4096"."""
    return ", ".join(f"{name} is {one} and {other}" for name, (one, other) in fields.items())


def quantities(profile: StepProfile) -> dict[tuple[str, str, Unit], float | None]:
    """What is compared, by (place, name, unit), in the order of the table; peak allocated first."""
    memory, step = profile.memory, profile.step
    found: dict[tuple[str, str, Unit], float | None] = {
        # out of memory, the step has no peak: what was there then is no more than a lower bound
        ("total", "peak allocated", "bytes"): None if profile.oom else memory.peak_allocated_bytes,
        ("total", "peak reserved", "bytes"): memory.peak_reserved_bytes,
        ("total", "process", "bytes"): memory.process_bytes,
        ("total", "first step peak", "bytes"): memory.first_step_peak_allocated_bytes,
        ("total", "setup peak", "bytes"): memory.setup_peak_allocated_bytes,
        ("total", "host", "bytes"): memory.host_bytes,
    }
    for category, size in memory.at_peak.by_category().items():
        found["at peak", category, "bytes"] = size
    for name in PHASES:
        phase = profile.phases.get(name, PhaseStats())
        found[name, "peak", "bytes"] = phase.peak_allocated_bytes
        found[name, "at end", "bytes"] = phase.allocated_at_end_bytes
        found[name, "FLOPs", "flops"] = phase.flops
        found[name, "time", "s"] = phase.time_s.median
    found["step", "model FLOPs", "flops"] = step.model_flops
    found["step", "time", "s"] = step.time_s.median
    return found


def _notes(profiles: dict[str, StepProfile]) -> Iterator[str]:
    for source, profile in profiles.items():
        if profile.oom is not None:
            yield f"{source}: out of memory in {profile.oom.phase} on {profile.hardware.name}"
        elif not profile.complete:
            yield f"{source}: the run was interrupted, so its numbers are of the steps it finished"
    measured = profiles.get("measured")
    if measured is not None and measured.hardware.kind == "cpu":
        yield (
            "measured on a CPU: bytes of live tensors, without the 512-byte blocks, the kernels and the "
            "workspaces of a GPU, and times that say nothing about one"
        )
    phases = {source: p.memory.peak_phase for source, p in profiles.items() if p.memory.peak_phase}
    if len(set(phases.values())) > 1:
        where = ", ".join(f"{source} in {phase}" for source, phase in phases.items())
        yield f"the peaks lie in different phases, so their categories differ: {where}"
    simulated = profiles.get("simulated")
    for ran in (profiles.get("emulated"), measured):
        if ran is not None and simulated is not None:
            yield from _differences_of_origin(simulated, ran)


def _differences_of_origin(simulated: StepProfile, ran: StepProfile) -> Iterator[str]:
    """Library versions and allocator settings are part of what is simulated."""
    here: dict[str, str] = simulated.provenance.get("versions") or {}
    there: dict[str, str] = ran.provenance.get("versions") or {}
    versions = [
        f"{package} {here[package]} simulated, {there[package]} {ran.source}"
        for package in here
        if package in there and here[package].partition("+")[0] != there[package].partition("+")[0]
    ]
    if versions:
        yield f"different versions: {'; '.join(versions)}"
    kernels = [_kernels(p) for p in (simulated, ran)]
    if all(kernels) and kernels[0] != kernels[1]:
        yield f"different attention kernels: {kernels[0]} simulated, {kernels[1]} {ran.source}"


def _kernels(profile: StepProfile) -> list[str]:
    """The attention kernels that ran; a measurement has them by their operators' names."""
    names: list[str] = profile.provenance.get("attention_kernels") or []
    plain = {"aten._safe_softmax": "math"}
    short = re.compile(r"aten\._scaled_dot_product_(\w+)_attention")
    return sorted(short.sub(r"\1", plain.get(name, name)) for name in names)


def unexplained_lines(comparison: Comparison) -> Iterator[str]:
    """For each prediction the size of what is missing (negative: too much), and in which places it lies."""
    for source in comparison.predictions:
        total = comparison.peak().unexplained(source)
        parts = [f"{'unknown' if total is None else signed(total)} of the peak"]
        by_category = comparison.unexplained_by_category(source)
        by_phase = comparison.unexplained_by_phase(source)
        for kind, found in ("category", by_category), ("phase", by_phase):
            largest_first = sorted(found.items(), key=lambda place: -abs(place[1]))
            if found:
                places = ", ".join(f"{place} {signed(size)}" for place, size in largest_first)
                parts.append(f"by {kind}: {places}")
        yield f"unexplained, {comparison.reference} - {source}: {'; '.join(parts)}"


def signed(size_bytes: float) -> str:
    text = in_gib(int(size_bytes))
    return text if size_bytes < 0 else f"+{text}"
