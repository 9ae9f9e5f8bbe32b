"""The measured recipes of a device beside their predictions, how far off those are, and where they fail."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.import_results import EMULATED
from harness.answers.comparison import Comparison, compare
from harness.step_profile.step_profile import StepProfile

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
PREDICTIONS = ("napkin", "simulated")
MEDIAN_BARS = {("simulated", "peak allocated"): 0.003, ("napkin", "peak allocated"): 0.05}
WORST_BARS = {
    ("simulated", "peak allocated"): 0.01,
    ("simulated", "peak reserved"): 0.03,
    ("simulated", "process"): 0.03,
    ("simulated", "step time"): 0.15,
    ("napkin", "peak allocated"): 0.15,
}
"""How far a prediction may be off, as a fraction of what was measured."""


@dataclass(frozen=True)
class Row:
    """One recipe on one device."""

    name: str
    profiles: dict[str, StepProfile]
    """By source; one that ran, measured or emulated, is always there."""
    comparison: Comparison | None
    """None where there is no prediction."""

    @property
    def ran(self) -> StepProfile:
        """What predictions are held against: measured on a device, or emulated on a virtual GPU."""
        return self.profiles.get("measured") or self.profiles["emulated"]

    def value(self, source: str, quantity: str) -> float | None:
        """Bytes, or seconds for the step time. A run that ran out of memory has none."""
        profile = self.profiles.get(source)
        if profile is None or profile.oom is not None:
            return None
        values: dict[str, float | None] = {
            "peak allocated": profile.memory.peak_allocated_bytes,
            "peak reserved": profile.memory.peak_reserved_bytes,
            "process": profile.memory.process_bytes,
            "step time": profile.step.time_s.median,
        }
        return values[quantity]

    def ratio(self, source: str, quantity: str) -> float | None:
        """Prediction over measurement; None where they do not compare (times of different devices)."""
        if quantity == "step time" and self.ran.hardware.kind == "cpu":
            return None
        predicted, true = self.value(source, quantity), self.value(self.ran.source, quantity)
        return predicted / true if predicted is not None and true else None


def read_rows(folder: Path) -> list[Row]:
    """The recipes that ran, of profiles/<device>, by name; those that were measured with what a virtual GPU
    of the same device did. Raises InputError for a damaged profile."""
    rows = []
    for path in sorted([*folder.glob("*.measured.json"), *folder.glob("*.emulated.json")]):
        name, _, ran = path.name.removesuffix(".json").rpartition(".")
        profiles = {ran: StepProfile.read(path)}
        for source in PREDICTIONS:
            beside = folder / f"{name}.{source}.json"
            if beside.exists():
                profiles[source] = StepProfile.read(beside)
        on_virtual = folder.parent / f"{EMULATED}{folder.name}" / f"{name}.emulated.json"
        if on_virtual.exists():
            profiles["emulated"] = StepProfile.read(on_virtual)
        comparison = compare(list(profiles.values()), name) if len(profiles) > 1 else None
        rows.append(Row(name, profiles, comparison))
    return rows


def origin(rows: Sequence[Row]) -> Iterator[str]:
    """Driver, versions, settings, dates and commits of what was measured: every value that occurs."""
    facts: dict[str, dict[str, None]] = {}

    def note(name: str, value: Any) -> None:
        if value not in (None, ""):
            facts.setdefault(name, {})[str(value)] = None

    for row in rows:
        came_from = row.ran.provenance
        for name in ("driver", "cuda", "compute_capability", "python", "platform"):
            note(name.replace("_", " "), came_from.get(name))
        for kind in ("versions", "settings"):
            for name, value in (came_from.get(kind) or {}).items():
                note(name, value)
        note("date", str(came_from.get("time") or "")[:10])
        note("commit", str(came_from.get("git_commit") or "unknown")[:12])
    for name, values in facts.items():
        yield f"{name}: {', '.join(values)}"


def how_far_off(rows: Sequence[Row]) -> Iterator[str]:
    """Median and largest error of each kind of prediction, with its bars."""
    for (source, quantity), bar in WORST_BARS.items():
        known = [ratio for row in rows if (ratio := row.ratio(source, quantity)) is not None]
        if known:
            off = [abs(ratio - 1) for ratio in known]
            median_bar = MEDIAN_BARS.get((source, quantity))
            bars = f"bar {bar:.1%}" if median_bar is None else f"bars {median_bar:.1%} and {bar:.1%}"
            yield (
                f"{source}, {quantity}: off by {statistics.median(off):.2%} in the median and "
                f"{max(off):.2%} at most, of {len(known)} recipes ({bars})"
            )


def failures(rows: Iterable[Row]) -> Iterator[str]:
    """Every prediction beyond its bar, with the places where the bytes differ; what is not predicted; and
    what makes a comparison unfair, each once with how many recipes it is so for."""
    unfair: dict[str, list[str]] = {}
    for row in rows:
        for (source, quantity), bar in WORST_BARS.items():
            ratio = row.ratio(source, quantity)
            if ratio is not None and abs(ratio - 1) > bar:
                where = "".join(_places(row, source)) if quantity == "peak allocated" else ""
                yield f"{row.name}: {source} {quantity} is {ratio:.4f} of what was {row.ran.source}{where}"
        for source in PREDICTIONS:
            if source not in row.profiles:
                yield f"{row.name}: there is no {source} profile"
        on_gpu = row.ran.hardware.kind != "cpu"  # what differs on a CPU is said once
        for note in row.comparison.notes if row.comparison is not None and on_gpu else ():
            unfair.setdefault(note, []).append(row.name)
    for note, names in unfair.items():
        yield f"{names[0] if len(names) == 1 else f'{len(names)} recipes'}: {note}"


def _places(row: Row, source: str) -> Iterator[str]:
    """The four largest differences by category and by phase, measured minus predicted."""
    assert row.comparison is not None
    found = {
        "category": row.comparison.unexplained_by_category(source),
        "phase": row.comparison.unexplained_by_phase(source),
    }
    for kind, sizes in found.items():
        largest = sorted(sizes.items(), key=lambda item: -abs(item[1]))[:4]
        if largest:
            shown = ", ".join(f"{name} {_signed(size)}" for name, size in largest)
            yield f"; {row.ran.source} minus {source} by {kind}: {shown}"


def _signed(size_bytes: float) -> str:
    """ "+2.000 GiB", in the largest unit of which there is one."""
    name, unit = next(entry for entry in UNITS if abs(size_bytes) >= entry[1] or entry[1] == 1)
    return f"{size_bytes / unit:+.3f} {name}" if unit > 1 else f"{size_bytes:+.0f} bytes"
