"""The formula of a recipe: what simulations at some sizes say of others, exactly, as a guess or not at
all."""

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
from harness.step_profile import MemoryStats, OutOfMemoryReport, PhaseStats, StepProfile, StepStats, TimeStats
from harness.system import provenance


class Times(NamedTuple):
    """The times of a simulated step on one device, in seconds."""

    step: StepStats
    communication_s: dict[str, float]
    """The communication of each phase (PhaseStats.communication_s); empty for a single process."""
    kernels_s: dict[str, dict[str, float]]
    """The kernels' time by phase and class of kernel (PhaseStats.kernels_s); empty in older files."""

    @classmethod
    def of(cls, profile: StepProfile) -> Times:
        """The times in the profile of a simulation."""
        waits = {name: stats.communication_s for name, stats in profile.phases.items()}
        kernels = {name: stats.kernels_s for name, stats in profile.phases.items()}
        known = {name: seconds for name, seconds in waits.items() if seconds is not None}
        return cls(profile.step, known, kernels)

    def deeper(self, more: Times, times: int) -> Times:
        """The times of a deeper model, on the straight line through this one's and those of `more`.

        `more` are the times of a model that is some layers deeper than this one, and the result those of a
        model that is `times` as many layers deeper.
        """

        def line(one: float | None, other: float | None) -> float:
            return (one or 0.0) + times * ((other or 0.0) - (one or 0.0))

        few, many = self.step, more.step
        before, after = few.time_s, many.time_s
        time_s = TimeStats(
            median=(seconds := line(before.median, after.median)),
            p10=line(before.p10, after.p10),
            p90=line(before.p90, after.p90),
        )
        utilization = {  # MFU and HFU times the seconds are FLOPs, but for a factor of the device
            name: line(*((getattr(s, name) or 0.0) * (s.time_s.median or 0.0) for s in (few, many))) / seconds
            for name in ("mfu", "hfu")
        }
        step = few.model_copy(
            update={
                "time_s": time_s,
                "tokens_per_s": (few.tokens_per_s or 0.0) * (before.median or 0.0) / seconds,
                "model_flops": round(line(few.model_flops, many.model_flops)),
                "bound": many.bound,
                **utilization,
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
    """Everything that simulations of one recipe have shown: its pieces, times, warnings and outcomes."""

    key: dict[str, Any]
    """What it holds for: a recipe but for its sizes, a kind of GPU, versions (formula/store.py)."""
    pieces: list[Piece] = field(default_factory=list[Piece])
    """Its requests: a piece for each sequence of requests that was seen."""
    warnings: list[str] = field(default_factory=list[str])
    """The warnings of the latest simulation with all layers, or before there is one with few."""
    times: dict[str, Times] = field(default_factory=dict[str, Times])
    """The times of each simulated step, by device and sizes. Times are never derived for other sizes."""
    host_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """What each simulated step that offloads keeps in host memory, by sizes."""
    refused: str = ""
    """Why the recipe's engine (FSDP2, DDP, TP) cannot divide the model; empty if it can or was not tried."""
    outcomes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Replays that were made already, by sizes, device memory and allocator settings. At sizes that no piece
    knows exactly, an outcome is a guess, which is dropped when new pieces change it."""
    changed: bool = False
    """Whether it has learned anything since it was read from its file."""

    def learn(
        self,
        log: RequestLog,
        profile: StepProfile,
        labels: Mapping[int, Label] | None = None,
        times: Mapping[str, Times] = {},
        *,
        whole: bool = True,
    ) -> None:
        """Take in a simulation that did not run out of memory: its log, and its profile.

        `labels` say by key what its allocations are for, `times` are by device as `timed_on` names it, and
        `whole` is false for a model that was simulated with few of its layers.
        """
        recipe = Recipe.model_validate(profile.recipe)
        self._add([Piece.of(log, point_of(recipe), labels, whole=whole)])
        self.warnings = profile.warnings if whole else self.warnings or profile.warnings
        self.changed = True
        if profile.memory.host_bytes:
            self.host_bytes[_sizes(recipe)] = profile.memory.host_bytes
        for device, found in times.items():
            self.times[_name(device, recipe)] = found

    def merge(self, other: Formula) -> None:
        """Take in what another process learned of the same recipe."""
        before = self._amounts()
        exact = {n: found for n, found in other.outcomes.items() if other.knowing(Point(*found["point"]))}
        self.outcomes |= other.outcomes
        self._add(other.pieces)
        self.outcomes |= exact  # where nothing was known before, they were taken for guesses
        self.times |= other.times
        self.host_bytes |= other.host_bytes
        self.warnings, self.refused = self.warnings or other.warnings, self.refused or other.refused
        self.changed = self.changed or other.changed or self._amounts() != before

    def _amounts(self) -> tuple[int, ...]:
        """How much it knows: these numbers differ after it has learned something."""
        whole = sum(len(piece.whole) for piece in self.pieces)
        return len(self.outcomes), len(self.simulated_at()), whole, len(self.times), len(self.refused)

    def _add(self, pieces: Iterable[Piece]) -> None:
        """Add pieces, and drop outcomes that were guesses and would now be guessed differently."""
        points = {Point(*found["point"]) for found in self.outcomes.values()}
        guessed = {point: self._piece_and_sizes(point) for point in points if not self.knowing(point)}
        for piece in pieces:
            if not any(known.add(piece) for known in self.pieces):
                self.pieces = [known for known in self.pieces if not known.contradicts(piece)]
                self.pieces.append(piece)
        wrong = {point for point, before in guessed.items() if before != self._piece_and_sizes(point)}
        for key in [key for key, found in self.outcomes.items() if Point(*found["point"]) in wrong]:
            del self.outcomes[key]

    def forget_few_layers(self) -> None:
        """Forget every point that was simulated with few layers alone, and all outcomes with them."""
        if any(not piece.whole for piece in self.pieces):
            self.pieces = [piece for piece in self.pieces if piece.whole]
            self.outcomes.clear()

    def has_times(self, recipe: Recipe, devices: Iterable[Hardware]) -> bool:
        """Whether a step of these very sizes was timed on all `devices`."""
        return all(_name(timed_on(device), recipe) in self.times for device in devices)

    def knowing(self, point: Point) -> Piece | None:
        """The piece whose requests are exact at `point`; None if there is none."""
        return next((piece for piece in self.pieces if piece.knows(point)), None)

    def guessing(self, point: Point) -> Piece | None:
        """The likeliest piece at `point`: of those that may hold there, the one simulated nearest to it."""
        explaining = [piece for piece in self.pieces if piece.may_hold(point)]
        return min(explaining, key=lambda piece: piece.distance(point), default=None)

    def requests(self, point: Point) -> RequestLog | None:
        """The log of the step's requests at `point`, exact or a guess; None if no piece holds there."""
        piece = self._exact_or_likely(point)
        try:
            return None if piece is None else piece.at(point)
        except ValueError:
            return None

    def _exact_or_likely(self, point: Point) -> Piece | None:
        return self.knowing(point) or self.guessing(point)

    def _piece_and_sizes(self, point: Point) -> tuple[int, list[int]] | None:
        """The identity of the piece that holds at `point`, with the bytes of its allocations there."""
        piece = self._exact_or_likely(point)
        try:
            return None if piece is None else (id(piece), piece.sizes_at(point))
        except ValueError:
            return None

    def simulated_at(self) -> list[Point]:
        """All points that were simulated."""
        return [point for piece in self.pieces for point in piece.points]

    def least_bytes(self, point: Point) -> int | None:
        """The step's peak bytes without fragmentation, exact or a guess: with less it cannot fit. None if no
        piece holds at `point`."""
        key = f"least {point.micro_batch_size} x {point.seq_len}"
        if key not in self.outcomes:
            log = self.requests(point)
            if log is None:
                return None
            self.changed = True
            self.outcomes[key] = {"point": point, "bytes": least_bytes(log)}
        return self.outcomes[key]["bytes"]

    def _host_bytes(self, recipe: Recipe) -> int | None:
        """What the step keeps in host memory. Unless activations are there, it is the same at all sizes."""
        known = self.host_bytes.get(_sizes(recipe))
        if known is None and not recipe.blocks_on_host:
            known = next(iter(self.host_bytes.values()), None)
        return known

    def profile(self, recipe: Recipe, hardware: Hardware, settings: Settings) -> StepProfile:
        """The profile that a simulation of `recipe` on `hardware` has, exact or a guess.

        It does not say what is alive at the peak. It has times only where these sizes were simulated for this
        device. Raises ValueError where no piece holds at the recipe's sizes.
        """
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

    def fits(self, recipe: Recipe, hardware: Hardware, settings: Settings) -> bool:
        """Whether the step fits on the device, exact or a guess. Raises ValueError as `profile` does.

        Where there is far too little memory, it takes a tenth of the time of `profile`.
        """
        if self._known_outcome(recipe, hardware, settings) is None:
            least = self.least_bytes(point_of(recipe))
            if least is not None and least > _capacity_bytes(hardware):
                return False
        return self._outcome(recipe, hardware, settings).out_of_memory is None

    def _outcome(self, recipe: Recipe, hardware: Hardware, settings: Settings) -> Outcome:
        """The outcome on a device of this memory; replayed unless it is known."""
        found = self._known_outcome(recipe, hardware, settings)
        if found is None:
            key = _outcome_name(recipe, hardware, settings)
            log = self.requests(point_of(recipe))
            if log is None:
                raise ValueError(f"nothing is known of {key}")
            outcome = outcome_of(log, recipe, hardware, settings)
            self.changed = True
            self.outcomes[key] = found = {"point": point_of(recipe), **outcome.as_json()}
        return Outcome.from_json(found)

    def _known_outcome(self, recipe: Recipe, hardware: Hardware, settings: Settings) -> dict[str, Any] | None:
        """What was replayed with as much memory, or with another amount, of which no more was used than the
        device has: then all happens in the same way. None where nothing was."""
        known = self.outcomes.get(_outcome_name(recipe, hardware, settings))
        if known is not None or settings.depend_on_memory:
            return known
        same, capacity = f" {settings} {_sizes(recipe)}", _capacity_bytes(hardware)
        others = (found for name, found in self.outcomes.items() if name.endswith(same))
        return next((one for one in others if (one.get("most_used") or capacity + 1) <= capacity), None)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "pieces": [piece.as_json() for piece in self.pieces],
            "warnings": self.warnings,
            "times": {key: found.as_json() for key, found in self.times.items()},
            "host_bytes": self.host_bytes,
            "refused": self.refused,
            "outcomes": self.outcomes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Formula:
        """What `as_json` wrote. For anything else it raises whatever Python raises."""
        return cls(
            document["key"],
            [Piece.from_json(piece) for piece in document["pieces"]],
            document["warnings"],
            {key: Times.from_json(found) for key, found in document["times"].items()},
            document.get("host_bytes", {}),
            document["refused"],
            document["outcomes"],
        )


@cache
def _provenance() -> dict[str, Any]:
    """Computed once, since it asks git and every installed package and a search makes many profiles."""
    return provenance()


def timed_on(hardware: Hardware) -> str:
    """A name for a device with its calibration, which together decide how long a step takes."""
    calibration = hashlib.sha256(hardware.calibration.model_dump_json().encode()).hexdigest()
    return f"{hardware.name} {calibration[:12]}"


def point_of(recipe: Recipe) -> Point:
    """The sizes of a recipe."""
    return Point(recipe.micro_batch_size, recipe.seq_len)


def outcome_of(log: RequestLog, recipe: Recipe, hardware: Hardware, settings: Settings) -> Outcome:
    """The outcome of `log` on `hardware`, with as many steps as a measurement of `recipe` has."""
    steps = sum(mark.what == "step" for mark in log.marks)
    repeats = max(0, recipe.measured_steps - steps)
    return outcome(log, settings, _capacity_bytes(hardware), hardware.memory_bytes, repeats)


def _capacity_bytes(hardware: Hardware) -> int:
    """What the allocator can take of the device's memory."""
    return hardware.memory_bytes - hardware.calibration.cuda_context_bytes


def _outcome_name(recipe: Recipe, hardware: Hardware, settings: Settings) -> str:
    """A name for all that an outcome depends on beside the requests."""
    return _name(f"{hardware.memory_bytes} {hardware.calibration.cuda_context_bytes} {settings}", recipe)


def _name(device: str, recipe: Recipe) -> str:
    return f"{device} {_sizes(recipe)}"


def _sizes(recipe: Recipe) -> str:
    return f"{recipe.micro_batch_size} x {recipe.seq_len}"
