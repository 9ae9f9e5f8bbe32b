"""`harness diff`: where the bytes and the times of two profiles differ, whatever their recipes, libraries or
devices are. Imports no torch.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from harness.answers.comparison import described, different_fields, quantities, signed
from harness.errors import InputError
from harness.hardware import Hardware
from harness.recipe import Recipe, recipe_yaml
from harness.snapshot import by_kind_of_module, place, read_snapshot, recording_of
from harness.step_profile import (
    PHASES_BETWEEN_STEPS,
    PhaseStats,
    StepProfile,
    TimeStats,
    change_of_time_in_words,
    ranks_in_words,
)
from harness.units import in_gib, in_ms, ms

MODULES = 8
"""The most modules that are listed."""
MOST_ONLY_ONE = 3
"""The most allocations that are listed for a phase and a simulation as made in this one only."""
OUT_OF_MEMORY = 3
"""The exit status of a simulation that ran out of memory. It prints its profile all the same."""
TIMEOUT_S = 3600
"""The longest that a simulation by another interpreter may take, in seconds."""
_SETTING = re.compile(r"(\w+)=(\([^)]*\)|[^,()]+)")
"""One of the allocator's settings in a simulated profile's provenance: its name and its value."""


@dataclass(frozen=True)
class Difference:
    """One quantity in both profiles, in bytes; None where a profile does not know it."""

    place: str
    name: str
    first: int | None
    second: int | None

    @property
    def change(self) -> int | None:
        """The second less the first."""
        return None if self.first is None or self.second is None else self.second - self.first


@dataclass(frozen=True)
class OnlyOne:
    """The allocations of a phase that only one of two simulations makes: the size of each in bytes, and the
    line of code that asks for it."""

    phase: str
    first: list[tuple[int, str]]
    second: list[tuple[int, str]]


@dataclass(frozen=True)
class TimeDifference:
    """How long a step takes in both, in seconds."""

    first: TimeStats
    second: TimeStats
    tokens_per_s: tuple[float | None, float | None]
    by_kernel: dict[str, tuple[float, float]]
    """The seconds of each kind of kernel in both, the largest change first; empty where one does not know."""

    @property
    def change(self) -> float:
        """The second's median less the first's."""
        return (self.second.median or 0.0) - (self.first.median or 0.0)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "first": self.first.model_dump(),
            "second": self.second.model_dump(),
            "tokens_per_s": self.tokens_per_s,
            "by_kernel": {
                kernel: {"first": first, "second": second}
                for kernel, (first, second) in self.by_kernel.items()
            },
        }


@dataclass
class ProfileDiff:
    """What differs between two profiles."""

    recipe: dict[str, tuple[Any, Any]]
    """The fields that matter to memory or time and differ, with both values."""
    versions: dict[str, tuple[str | None, str | None]]
    """The libraries whose versions differ, with both; None where a profile does not name the library."""
    notes: list[str]
    """Sentences about other differences: source, device, attention kernels, allocator settings."""
    peak: Difference
    """The peak of allocated memory."""
    bytes: list[Difference]
    """The totals, categories and phases that differ, besides `peak`."""
    modules: list[Difference]
    """The bytes of modules at the peak, layers of one kind together, the largest change first."""
    ranks: tuple[list[str], ...]
    """Sentences that compare the ranks of a profile with one another; empty for one of a single process."""
    divergences: list[OnlyOne] = field(default_factory=list["OnlyOne"])
    """The first allocations of each phase that only one makes, where both recorded their histories."""
    time: TimeDifference | None = None
    """The time of a step; None where a profile does not know it."""
    second_ran_out: bool = False
    """Whether the second ran out of memory and the first did not."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "recipe": self.recipe,
            "versions": self.versions,
            "notes": self.notes,
            "ranks": self.ranks,
            "time_s": self.time and self.time.as_json(),
            "differences": [asdict(row) for row in (self.peak, *self.bytes, *self.modules)],
            "divergences": [
                {
                    "phase": only.phase,
                    "only_first": [("alloc", *allocation) for allocation in only.first],
                    "only_second": [("alloc", *allocation) for allocation in only.second],
                }
                for only in self.divergences
            ],
        }


def diff_profiles(first: StepProfile, second: StepProfile) -> ProfileDiff:
    """What differs between two profiles, whatever their sources, recipes and devices."""
    known = [_bytes(profile) for profile in (first, second)]
    places = dict.fromkeys([*known[0], *known[1]])
    peak, *others = (Difference(*key, known[0].get(key), known[1].get(key)) for key in places)
    modules = [by_kind_of_module(p.memory.at_peak_by_module or {}) for p in (first, second)]
    changes = [
        Difference("module", name, modules[0].get(name, 0), modules[1].get(name, 0))
        for name in (set(modules[0]) | set(modules[1]) if all(modules) else ())
    ]
    changes.sort(key=lambda change: (-abs(change.change or 0), change.name))
    of_recipes = (
        first.recipe is not None and second.recipe is not None
    )  # a profile of `harness watch` has none
    return ProfileDiff(
        recipe=different_fields(first.recipe or {}, second.recipe or {}) if of_recipes else {},
        versions=_versions(first, second),
        notes=list(_notes(first, second)),
        peak=peak,
        bytes=[change for change in [*others, *_ranks(first, second)] if change.first != change.second],
        modules=[change for change in changes if change.change],
        ranks=tuple([*ranks_in_words(p.ranks)] if p.ranks else [] for p in (first, second)),
        time=_time(first, second),
        second_ran_out=first.oom is None and second.oom is not None,
    )


def _time(first: StepProfile, second: StepProfile) -> TimeDifference | None:
    """The time of a step in both; None where one does not know it."""
    times = first.step.time_s, second.step.time_s
    if not all(time.median for time in times):
        return None
    before, after = first.kernels_s(), second.kernels_s()
    both = {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in {**before, **after}}
    changes = sorted(both.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    tokens = first.step.tokens_per_s, second.step.tokens_per_s
    return TimeDifference(*times, tokens, dict(changes) if before and after else {})


def _ranks(first: StepProfile, second: StepProfile) -> Iterator[Difference]:
    """The peak of each rank, where a profile is of several."""
    peaks = [
        {} if p.ranks is None else {r.rank: r.peak_allocated_bytes for r in p.ranks.ranks}
        for p in (first, second)
    ]
    for rank in sorted(set(peaks[0]) | set(peaks[1])):
        yield Difference("rank", str(rank), peaks[0].get(rank), peaks[1].get(rank))


def _bytes(profile: StepProfile) -> dict[tuple[str, str], int | None]:
    """The bytes of a profile by place and name: totals, categories at the peak and phases. The first is the
    peak of allocated memory."""
    found: dict[tuple[str, str], int | None] = {
        (place, name): None if value is None else int(value)
        for (place, name, unit), value in quantities(profile).items()
        if unit == "bytes"
    }
    for name in PHASES_BETWEEN_STEPS:
        found[name, "peak"] = profile.phases.get(name, PhaseStats()).peak_allocated_bytes
    return found


def _versions(first: StepProfile, second: StepProfile) -> dict[str, tuple[str | None, str | None]]:
    before, after = (cast("dict[str, str]", p.provenance.get("versions") or {}) for p in (first, second))
    return {
        name: (before.get(name), after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    }


def _notes(first: StepProfile, second: StepProfile) -> Iterator[str]:
    if first.source != second.source:
        yield f"the first is {first.source}, the second {second.source}"
    if first.hardware.name != second.hardware.name:
        yield f"the first is on {first.hardware.name}, the second on {second.hardware.name}"
    kernels = [profile.provenance.get("attention_kernels") for profile in (first, second)]
    if kernels[0] != kernels[1]:
        yield f"attention kernels: {kernels[0]} and {kernels[1]}"
    settings = [dict(_SETTING.findall(str(p.provenance.get("allocator")))) for p in (first, second)]
    if all(settings):
        for name in {**settings[0], **settings[1]}:
            before, after = (values.get(name) for values in settings)
            if before != after:
                yield f"allocator: {name} is {before} and {after}"
    for which, profile in (("first", first), ("second", second)):
        if profile.oom is not None:
            yield f"the {which} runs out of memory in {profile.oom.phase}: it has no peak"


def simulated_by(
    python: str, recipe: Recipe, hardware: Hardware, memory: str | None = None
) -> tuple[StepProfile, dict[str, Any] | None]:
    """Simulate the recipe by another interpreter with its own libraries. Returns profile and snapshot.

    The interpreter `python` runs this very harness. `memory` is the size of the device, as on a command line.
    Raises InputError where it cannot run, fails or takes too long, with its last line.
    """
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(recipe_yaml(recipe), encoding="utf-8")
        out = Path(folder, "run")
        command = [python, "-m", "harness", "simulate", str(path), f"hardware={hardware.name}"]
        command += ["--json", "--out", str(out), *(() if memory is None else ("--memory", memory))]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
                env={**os.environ, "PYTHONPATH": paths},
            )
        except OSError as error:
            raise InputError(
                f"--python {python}: {error.strerror}. Give the python of an environment with torch and "
                "transformers, for example .venv/bin/python."
            ) from None
        except subprocess.TimeoutExpired:
            raise InputError(f"--python {python}: no answer in {TIMEOUT_S} s.") from None
        if done.returncode not in (0, OUT_OF_MEMORY):
            last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise InputError(f"--python {python}: the simulation does not run there: {last_line}")
        snapshot = out / "snapshot.pickle"
        profile = StepProfile.from_json(done.stdout, f"what {python} simulates")
        return profile, read_snapshot(snapshot) if snapshot.exists() else None


def asked_by_one(first: dict[str, Any], second: dict[str, Any]) -> list[OnlyOne]:
    """The first allocations of each phase that only one of two simulated snapshots makes. An allocation that
    is made at another point of the phase is no difference."""
    ours, theirs = _allocations(first), _allocations(second)
    found = [
        OnlyOne(
            phase,
            _missing(ours.get(phase, []), theirs.get(phase, [])),
            _missing(theirs.get(phase, []), ours.get(phase, [])),
        )
        for phase in {**ours, **theirs}
    ]
    return [only for only in found if only.first or only.second]


def _allocations(snapshot: dict[str, Any]) -> dict[str, list[tuple[int, str]]]:
    """The allocations of a simulation by phase: the size of each in bytes, and the line that asks for it."""
    found: dict[str, list[tuple[int, str]]] = {}
    recording = recording_of(snapshot)
    for entry, phase in zip(recording.trace, recording.phases, strict=True):
        if entry["action"] == "alloc" and phase not in (None, "setup"):
            found.setdefault(phase, []).append((entry["size"], place(entry["frames"])))
    return found


def _missing(ours: list[tuple[int, str]], theirs: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The first MOST_ONLY_ONE of `ours` that are missing among `theirs`. One of the same size that another
    line asks for is not missing."""
    too_many = Counter(size for size, _ in ours) - Counter(size for size, _ in theirs)
    unpaired = Counter(ours) - Counter(theirs)
    found: list[tuple[int, str]] = []
    for allocation in ours:
        if too_many[allocation[0]] and unpaired[allocation]:
            too_many[allocation[0]] -= 1
            unpaired[allocation] -= 1
            found.append(allocation)
    return found[:MOST_ONLY_ONE]


def _percent(share: float) -> str:
    """A relative change with its sign, with more digits where it is small."""
    return f"{share:+.1%}" if abs(share) >= 0.001 else f"{share:+.3%}"


def _time_lines(time: TimeDifference) -> Iterator[str]:
    """How long a step takes in both, how sure that is where the estimates say so, and the kernels that make
    the change."""
    first, second = time.first.median or 0.0, time.second.median or 0.0
    before, after = time.tokens_per_s
    rates = ""
    if before and after:
        rates = f"  {before:,.0f} and {after:,.0f} tokens/s: {_percent(after / before - 1)}"
    if first == second:
        yield f"time of a step: {in_ms(first)}, the same"
        if rates and before != after:
            yield rates
        return
    change = f"{time.change * 1e3:+,.1f} ms ({_percent(time.change / first)})"
    yield f"time of a step: {in_ms(first)} and {in_ms(second)}: {change}"
    if rates:
        yield rates
    ranges = [(stats.p10, stats.p90) for stats in (time.first, time.second)]
    if all(low is not None and high is not None for low, high in ranges):
        both = " and ".join(f"{ms(low or 0)} to {ms(high or 0)}" for low, high in ranges)
        yield f"  from and to, four times of five: {both} ms"
    if parts := change_of_time_in_words(time.by_kernel):
        yield f"  of it {parts}"


def diff_lines(diff: ProfileDiff, names: tuple[str, str]) -> Iterator[str]:
    """What `harness diff` prints, line by line. `names` are those of the two profiles."""
    yield f"first:  {names[0]}"
    yield f"second: {names[1]}"
    if diff.versions:
        versions = (f"{name} {a or '(none)'} and {b or '(none)'}" for name, (a, b) in diff.versions.items())
        yield f"versions: {'; '.join(versions)}"
    if diff.recipe:
        yield f"recipe: {described(diff.recipe)}"
    yield from (f"note: {note}" for note in diff.notes)
    peak = diff.peak
    if peak.change is None:
        yield f"peak allocated: {in_gib(peak.first)} and {in_gib(peak.second)}"
    elif not peak.change:
        yield f"peak allocated: {in_gib(peak.first)}, the same to the byte"
    else:
        share = f" ({_percent(peak.change / peak.first)})" if peak.first else ""
        yield f"peak allocated: {in_gib(peak.first)} and {in_gib(peak.second)}: {signed(peak.change)}{share}"
    if diff.time is not None:
        yield from _time_lines(diff.time)
    if diff.bytes:
        yield ""
        yield f"  {'place':<16} {'what':<18} {'first':>12} {'second':>12} {'change':>12}"
    for row in diff.bytes:
        change = "-" if row.change is None else signed(row.change)
        values = f"{in_gib(row.first):>12} {in_gib(row.second):>12} {change:>12}"
        yield f"  {row.place:<16} {row.name:<18} {values}"
    for which, words in zip(("first", "second"), diff.ranks, strict=True):
        yield from (f"{which}: {sentence}" for sentence in words)
    if diff.modules:
        yield ""
        yield "modules at the peak, layers of one kind (*) together, the largest changes"
        for row in diff.modules[:MODULES]:
            yield f"  {signed(row.change or 0):>12}  {row.name}"
    if diff.divergences and diff.bytes:
        yield ""
        yield "the first allocations that only one of them makes"
        for only in diff.divergences:
            for which, allocations in (("first", only.first), ("second", only.second)):
                for size_bytes, where in allocations:
                    yield f"  in {only.phase}, only the {which}: {in_gib(size_bytes)} at {where}"
