"""What simulations of one recipe at several sizes say of any size: exactly, as a guess, or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from harness.allocator import Settings
from harness.formula.expression import Point
from harness.formula.outcome import Outcome, least_bytes, outcome
from harness.formula.piece import Piece
from harness.formula.request_log import Label, RequestLog
from harness.hardware import Hardware
from harness.recipe import Recipe
from harness.step_profile import (
    MemoryStats,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)
from harness.system import provenance


class Times(NamedTuple):
    """What a simulated step takes on one device."""

    step: StepStats
    communication_s: dict[str, float]
    """By phase; of a step of one process nothing. See PhaseStats."""
    kernels_s: dict[str, dict[str, float]]
    """By phase and class of kernel; nothing where it was not kept. See PhaseStats."""

    @classmethod
    def of(cls, profile: StepProfile) -> Times:
        """Those of a simulation's profile."""
        waits = {name: stats.communication_s for name, stats in profile.phases.items()}
        kernels = {name: stats.kernels_s for name, stats in profile.phases.items()}
        known = {name: seconds for name, seconds in waits.items() if seconds is not None}
        return cls(profile.step, known, kernels)

    def deeper(self, more: Times, times: int) -> Times:
        """Those of a step in which `times` as much is added to this one as `more` adds to it."""

        def line(one: float | None, other: float | None) -> float:
            return (one or 0.0) + times * ((other or 0.0) - (one or 0.0))

        few, many = self.step, more.step
        before, after = few.time_s, many.time_s
        taken = TimeStats(
            median=(seconds := line(before.median, after.median)),
            p10=line(before.p10, after.p10),
            p90=line(before.p90, after.p90),
        )
        done = {  # MFU and HFU times the seconds are FLOPs, but for a factor of the device
            name: line(*((getattr(s, name) or 0.0) * (s.time_s.median or 0.0) for s in (few, many))) / seconds
            for name in ("mfu", "hfu")
        }
        step = few.model_copy(
            update={
                "time_s": taken,
                "tokens_per_s": (few.tokens_per_s or 0.0) * (before.median or 0.0) / seconds,
                "model_flops": round(line(few.model_flops, many.model_flops)),
                "bound": many.bound,
                **done,
            }
        )
        waits = {name: line(s, more.communication_s[name]) for name, s in self.communication_s.items()}
        kernels = {
            phase: {kind: line(found.get(kind), longer) for kind, longer in more.kernels_s[phase].items()}
            for phase, found in self.kernels_s.items()
        }
        return Times(step, waits, kernels)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self._asdict(), "step": self.step.model_dump(mode="json")}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Times:
        """What `as_json` wrote."""
        waits, kernels = document["communication_s"], document.get("kernels_s", {})
        return cls(StepStats.model_validate(document["step"]), waits, kernels)


@dataclass
class Formula:
    """The pieces that were found, and what else a simulation told."""

    key: dict[str, Any]
    """What it holds for: a recipe but for its sizes, a kind of GPU, versions (formula/store.py)."""
    pieces: list[Piece] = field(default_factory=list[Piece])
    warnings: list[str] = field(default_factory=list[str])
    times: dict[str, Times] = field(default_factory=dict[str, Times])
    """Of the simulated steps, by device and sizes: of no other."""
    host_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """What the simulated steps keep in host memory, of those that offload, by sizes."""
    refused: str = ""
    """Why the engine of the recipe cannot divide its model; empty where it can, or where nobody has asked."""
    outcomes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What was found for a device's memory and an allocator's settings, by these and sizes: exactly, or as
    the pieces are that are known so far."""
    changed: bool = False
    """Since it was read."""

    def learn(
        self,
        log: RequestLog,
        profile: StepProfile,
        labels: Mapping[int, Label] | None = None,
        times: Mapping[str, Times] = {},
        *,
        whole: bool = True,
    ) -> None:
        """Another simulation, of a step that did not run out of memory: what its requests are for, by key,
        and its times, by device (`timed_on`). `whole`: of all layers."""
        recipe = Recipe.model_validate(profile.recipe)
        self._add([Piece.of(log, point_of(recipe), labels, whole=whole)])
        self.warnings, self.changed = profile.warnings, True
        if profile.memory.host_bytes:
            self.host_bytes[_sizes(recipe)] = profile.memory.host_bytes
        for device, found in times.items():
            self.times[_name(device, recipe)] = found

    def merge(self, other: Formula) -> None:
        """What another process learned of the same recipe."""
        before = self._how_much()
        exact = {n: found for n, found in other.outcomes.items() if other.knowing(Point(*found["point"]))}
        self.outcomes |= other.outcomes
        self._add(other.pieces)
        self.outcomes |= exact  # where nothing was known before, they were taken for guesses
        self.times |= other.times
        self.host_bytes |= other.host_bytes
        self.warnings, self.refused = self.warnings or other.warnings, self.refused or other.refused
        self.changed = self.changed or other.changed or self._how_much() != before

    def _how_much(self) -> tuple[int, ...]:
        whole = sum(len(piece.whole) for piece in self.pieces)
        return len(self.outcomes), len(self.simulated_at()), whole, len(self.times), len(self.refused)

    def _add(self, pieces: Iterable[Piece]) -> None:
        """More pieces. Outcomes that were guessed and would be guessed otherwise now are forgotten."""
        points = {Point(*found["point"]) for found in self.outcomes.values()}
        guessed = {point: self._sizes(point) for point in points if not self.knowing(point)}
        for piece in pieces:
            if not any(known.add(piece) for known in self.pieces):
                self.pieces = [known for known in self.pieces if not known.contradicts(piece)]
                self.pieces.append(piece)
        wrong = {point for point, before in guessed.items() if before != self._sizes(point)}
        for asked in [asked for asked, found in self.outcomes.items() if Point(*found["point"]) in wrong]:
            del self.outcomes[asked]

    def forget_few_layers(self) -> None:
        """Know what simulations with all layers have shown, and no more."""
        if any(not piece.whole for piece in self.pieces):
            self.pieces = [piece for piece in self.pieces if piece.whole]
            self.outcomes.clear()

    def has_times(self, recipe: Recipe, devices: Iterable[Hardware]) -> bool:
        """Whether the step was timed at these sizes on all of them."""
        return all(_name(timed_on(device), recipe) in self.times for device in devices)

    def knowing(self, point: Point) -> Piece | None:
        """The piece that says exactly what is asked for there."""
        return next((piece for piece in self.pieces if piece.knows(point)), None)

    def guessing(self, point: Point) -> Piece | None:
        """The piece that is likely to hold there: one that explains such sizes, derived nearest to it."""
        explaining = [piece for piece in self.pieces if piece.may_hold(point)]
        return min(explaining, key=lambda piece: piece.distance(point), default=None)

    def requests(self, point: Point) -> RequestLog | None:
        """What the step asks for at these sizes, if what was seen at others goes on; None if nobody knows."""
        piece = self._saying(point)
        try:
            return None if piece is None else piece.at(point)
        except ValueError:
            return None

    def _saying(self, point: Point) -> Piece | None:
        return self.knowing(point) or self.guessing(point)

    def _sizes(self, point: Point) -> tuple[int, list[int]] | None:
        """Which piece speaks of a point, and what it says."""
        piece = self._saying(point)
        try:
            return None if piece is None else (id(piece), piece.sizes_at(point))
        except ValueError:
            return None

    def simulated_at(self) -> list[Point]:
        """All sizes that were simulated."""
        return [point for piece in self.pieces for point in piece.points]

    def least_bytes(self, point: Point) -> int | None:
        """Of memory, without which the step does not fit, as far as is known; None if nothing is."""
        asked = f"least {point.micro_batch_size} x {point.seq_len}"
        if asked not in self.outcomes:
            log = self.requests(point)
            if log is None:
                return None
            self.changed = True
            self.outcomes[asked] = {"point": point, "bytes": least_bytes(log)}
        return self.outcomes[asked]["bytes"]

    def _host_bytes(self, recipe: Recipe) -> int | None:
        """Weights and states are as large at all sizes."""
        known = self.host_bytes.get(_sizes(recipe))
        if known is None and not recipe.activations_on_host:
            known = next(iter(self.host_bytes.values()), None)
        return known

    def profile(self, recipe: Recipe, hardware: Hardware, settings: Settings) -> StepProfile:
        """The profile of `recipe` on `hardware`: as simulated, or expected, but for what is at the peak, and
        with times only of the sizes that were simulated on this device, and host memory of those on any.
        Raises ValueError if nothing is known that says what the step asks for."""
        found = self._outcome(recipe, hardware, settings)
        times = self.times.get(_name(timed_on(hardware), recipe))
        context = hardware.calibration.cuda_context_bytes
        profile = StepProfile(
            source="simulated",
            recipe=recipe.model_dump(mode="json"),
            hardware=hardware.summary(recipe.compute_dtype),
            provenance={
                **_provenance(),
                "calibration": hardware.calibration.source,
                "allocator": str(settings),
                "formula": "the requests of a simulated step, with sizes derived from several",
            },
            complete=found.out_of_memory is None,
            warnings=self.warnings,
            memory=MemoryStats(
                kind="simulated_allocator",
                host_bytes=self._host_bytes(recipe),
                cuda_context_bytes=context,
                setup_peak_allocated_bytes=found.setup_bytes,
                first_step_peak_allocated_bytes=found.first_step_bytes,
            ),
            step=StepStats() if times is None else times.step.model_copy(deep=True),
        )
        error = found.out_of_memory
        if error is not None:
            profile.step = StepStats()
            profile.oom = OutOfMemoryReport(
                phase=found.phase,
                requested_bytes=error.requested_bytes,
                free_bytes=max(0, error.free_bytes),
                reserved_unallocated_bytes=error.reserved_unallocated_bytes,
            )
            return profile
        for name, (allocated, reserved) in found.phases.items():
            stats = PhaseStats(peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)
            if times is not None:
                stats.kernels_s = {**times.kernels_s.get(name, {})}
                if recipe.distributed:
                    stats.communication_s = times.communication_s.get(name, 0.0)
            profile.phases[name] = stats
        memory = profile.memory
        memory.peak_phase = found.peak_phase
        memory.peak_allocated_bytes, memory.peak_reserved_bytes = found.allocated_bytes, found.reserved_bytes
        memory.process_bytes = found.reserved_bytes + context
        memory.fragmentation_bytes = found.reserved_bytes - found.allocated_bytes
        return profile

    def _outcome(self, recipe: Recipe, hardware: Hardware, settings: Settings) -> Outcome:
        """Looked up where it was asked for before, and nothing was learnt since that could change it."""
        memory = f"{hardware.memory_bytes} {hardware.calibration.cuda_context_bytes} {settings}"
        asked = _name(memory, recipe)
        if asked not in self.outcomes:
            log = self.requests(point_of(recipe))
            if log is None:
                raise ValueError(f"nothing is known of {asked}")
            found = outcome_of(log, recipe, hardware, settings)
            self.changed = True
            self.outcomes[asked] = {"point": point_of(recipe), **found.as_json()}
        return Outcome.from_json(self.outcomes[asked])

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "pieces": [piece.as_json() for piece in self.pieces],
            "warnings": self.warnings,
            "times": {asked: found.as_json() for asked, found in self.times.items()},
            "host_bytes": self.host_bytes,
            "refused": self.refused,
            "outcomes": self.outcomes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Formula:
        """What `as_json` wrote. Raises whatever Python raises for anything else."""
        return cls(
            document["key"],
            [Piece.from_json(piece) for piece in document["pieces"]],
            document["warnings"],
            {asked: Times.from_json(found) for asked, found in document["times"].items()},
            document.get("host_bytes", {}),
            document["refused"],
            document["outcomes"],
        )


@cache
def _provenance() -> dict[str, Any]:
    """Asked of git and of every installed package once: a search asks for many profiles."""
    return provenance()


def timed_on(hardware: Hardware) -> str:
    """A device with its calibration, which decides how long a step takes."""
    calibration = hashlib.sha256(hardware.calibration.model_dump_json().encode()).hexdigest()
    return f"{hardware.name} {calibration[:12]}"


def point_of(recipe: Recipe) -> Point:
    """The sizes of a recipe."""
    return Point(recipe.micro_batch_size, recipe.seq_len)


def outcome_of(log: RequestLog, recipe: Recipe, hardware: Hardware, settings: Settings) -> Outcome:
    """What `log` comes to on `hardware`, with as many steps as a measurement of `recipe` has."""
    context = hardware.calibration.cuda_context_bytes
    steps = sum(mark.what == "step" for mark in log.marks)
    repeats = max(0, recipe.measured_steps - steps)
    return outcome(log, settings, hardware.memory_bytes - context, hardware.memory_bytes, repeats)


def _name(device: str, recipe: Recipe) -> str:
    return f"{device} {_sizes(recipe)}"


def _sizes(recipe: Recipe) -> str:
    return f"{recipe.micro_batch_size} x {recipe.seq_len}"
