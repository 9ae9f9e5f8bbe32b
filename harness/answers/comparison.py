"""The answers about one recipe side by side: what each says about every category and phase, and what remains
unexplained.

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
"""The kinds of answer, each of which may be the reference of those before it."""
Unit = Literal["bytes", "s", "flops"]


@dataclass(frozen=True)
class Row:
    """One quantity in all the answers."""

    place: str
    """What the quantity is of: `total`, `at peak`, `step`, or a phase."""
    name: str
    unit: Unit
    values: dict[str, float | None]
    """The value in each source's answer; None where that answer does not know it."""
    reference: str
    """The source whose value the others are compared with."""
    comparable: bool = True
    """False for times on different kinds of device."""

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
    """The recipe's name."""
    hardware: str
    """The device of the reference's profile."""
    reference: str
    """The source that the others are compared with."""
    predictions: tuple[str, ...]
    """The sources that are compared with the reference."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Sentences that a reader needs in order to judge the numbers."""

    def peak(self) -> Row:
        """The row that a tolerance applies to: peak allocated."""
        return self.rows[0]

    def unexplained_by_category(self, source: str) -> dict[str, float]:
        """Reference minus `source` at the peak, in bytes, for every category in which they differ."""
        rows = {row.name: row.unexplained(source) for row in self.rows if row.place == "at peak"}
        return {name: size for name, size in rows.items() if size}

    def unexplained_by_phase(self, source: str) -> dict[str, float]:
        """The reference's peak minus that of `source`, in bytes, for every phase in which they differ."""
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
        """The whole comparison as plain data: what `harness validate --json` prints of each recipe."""
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

    Raises InputError when there is none, when two have the same source, when they are of different recipes,
    or when there is nothing to hold a prediction against.
    """
    if not profiles:
        raise InputError(f"{name}: there is no answer to compare.")
    by_source: dict[str, StepProfile] = {}
    for profile in profiles:
        if profile.source in by_source:
            raise InputError(f"{name}: there are two {profile.source} profiles. Give one of each source.")
        by_source[profile.source] = profile
    first, *others = profiles
    for profile in others:
        fields = different_fields(first.recipe or {}, profile.recipe or {})
        if fields:
            raise InputError(
                f"{name}: the {first.source} and the {profile.source} profile are of different recipes: "
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


def different_fields(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields that matter to memory or time in which two recipes differ, with both values.

    A recipe that lacks a field, as older profiles do, has the field's default.
    """
    names = [name for name in {**first, **second} if name not in EFFECTS]
    pairs = {name: (first.get(name, _default(name)), second.get(name, _default(name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _default(name: str) -> Any:
    """The default of a recipe's field as JSON has it; None for a name that is no field."""
    default: Any = Recipe.model_fields[name].default if name in Recipe.model_fields else None
    return list(cast("tuple[str, ...]", default)) if isinstance(default, tuple) else default


def described(fields: dict[str, tuple[Any, Any]]) -> str:
    """What `different_fields` found, in words: "seq_len is 2048 and 4096"."""
    return ", ".join(f"{name} is {first} and {second}" for name, (first, second) in fields.items())


def quantities(profile: StepProfile) -> dict[tuple[str, str, Unit], float | None]:
    """The quantities of a profile that are compared, by (place, name, unit) as a Row has them, in the order
    of the table. The first is the peak of allocated memory."""
    memory, step = profile.memory, profile.step
    found: dict[tuple[str, str, Unit], float | None] = {
        # a step that ran out of memory has no peak: what was allocated then is only a lower bound
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
    """Notes on differences in the versions of libraries and in the attention kernels."""
    ours: dict[str, str] = simulated.provenance.get("versions") or {}
    theirs: dict[str, str] = ran.provenance.get("versions") or {}
    versions = [
        f"{package} {ours[package]} simulated, {theirs[package]} {ran.source}"
        for package in ours
        if package in theirs and ours[package].partition("+")[0] != theirs[package].partition("+")[0]
    ]
    if versions:
        yield f"different versions: {'; '.join(versions)}"
    kernels = [_kernels(p) for p in (simulated, ran)]
    if all(kernels) and kernels[0] != kernels[1]:
        yield f"different attention kernels: {kernels[0]} simulated, {kernels[1]} {ran.source}"


def _kernels(profile: StepProfile) -> list[str]:
    """The attention kernels of a profile by short names. A measured profile has their operators' names."""
    names: list[str] = profile.provenance.get("attention_kernels") or []
    plain = {"aten._safe_softmax": "math"}
    short = re.compile(r"aten\._scaled_dot_product_(\w+)_attention")
    return sorted(short.sub(r"\1", plain.get(name, name)) for name in names)


def unexplained_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each prediction: how many bytes of the peak it lacks (negative: has too many), and in which
    categories and phases they lie."""
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
    """A difference of sizes in GiB with its sign."""
    text = in_gib(size_bytes)
    return text if size_bytes < 0 else f"+{text}"
