"""StepProfile: what every answer (napkin, simulated, emulated, measured) returns, in JSON in and out.

Bytes are ints, times are float seconds. A quantity the producer cannot know is None (null), never 0.
GiB = 2**30 bytes. "allocated", "reserved" and "active" mean what torch.cuda.memory_stats means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from harness.errors import InputError
from harness.step_profile.between_steps import PHASES_BETWEEN_STEPS, CheckpointStats, EvaluationStats
from harness.step_profile.fields import MAX_DETAILS, Count, Details, Fields, Quantity
from harness.step_profile.memory import MemoryStats
from harness.step_profile.times import PhaseStats, StepStats
from harness.system import Rows, is_object, notebook_html, parse_json, read_whole
from harness.units import in_gib, in_ms

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 2**24
MAX_VALUES = 2**20
"""The most values in a profile's file: in a long run most are losses."""
PHASES = ("data", "forward", "backward", "optimizer_step")
OTHER_PHASES = ("between", *PHASES_BETWEEN_STEPS)  # of loops that are not ours: loops/finder.py


class Allocation(Fields):
    """One live allocation at the peak, or at an out-of-memory."""

    size_bytes: Count
    category: str
    phase: str | None = None
    module: str | None = None
    stack: list[str] = Field(default_factory=list[str], max_length=1000)


class OutOfMemoryReport(Fields):
    """Where memory ran out, what was requested, and what filled the memory."""

    phase: str
    requested_bytes: Count | None = None
    requested_is: str | None = None
    """What was asked for, in words, if its size tells: nothing else in this model is as large, or a tensor of
    the requesting line is."""
    requested_at: str | None = None
    """The requesting `file:line function` of the model or program; null in backward, where none runs."""
    free_bytes: Count | None = None
    reserved_unallocated_bytes: Count | None = None
    batch_rows: Count | None = None
    """The rows of the batch that the model of a watched program was last called with."""
    batch_bytes: Count | None = None
    """The bytes that were held for this batch: inputs and activations."""
    top: list[Allocation] = Field(default_factory=list[Allocation], max_length=1000)
    advice: list[str] = Field(default_factory=list[str], max_length=1000)


MOST_WEIGHTS = 10


class NotFiniteReport(Fields):
    """A loss or a weight was nan or infinite."""

    step: Count
    """The first step it was seen in, counted from 0 as in log.jsonl."""
    phase: str
    """forward: the loss of that step; optimizer_step: the weights after it, seen as a checkpoint was due."""
    value: str
    """nan, inf or -inf: the loss. not finite: the weights."""
    num_steps: Count = 1
    """In how many steps it was seen, when the recipe goes on (on_nan: continue)."""
    checkpoint: str | None = None
    """The last checkpoint from before it."""
    origin: Literal["setup", "forward", "backward", "optimizer_step"] | None = None
    """The phase that made it, perhaps in an earlier step. null: it cannot be known any more."""
    weights: list[str] = Field(default_factory=list[str], max_length=1000)
    """The weights, at most MOST_WEIGHTS, that were found not finite, where they show the origin."""

    def in_words(self) -> str:
        """What was not finite, and where."""
        what = f"the loss is {self.value}" if self.phase == "forward" else "a weight is nan or infinite"
        return f"{what}, in {self.phase} of step {self.step + 1}"

    def origin_in_words(self) -> str:
        """Where it came from, in a sentence."""
        weight = self.weights[0] if self.weights else "a weight"
        match self.origin:
            case "setup":
                return f"{weight} was not finite before the first step."
            case "forward":
                return "The weights were finite before that step: its forward pass made it."
            case "backward":
                return f"A gradient of {weight} was not finite: the optimizer's state of it is not either."
            case "optimizer_step":
                return f"The optimizer made it, out of finite gradients, in {weight}."
            case None:
                pass
        if self.weights:
            return f"Whether a gradient made it or the update, no moments are kept that tell ({weight})."
        return (
            "Which phase made it cannot be told: the update of that step has written over the weights. With "
            "checkpoint_every=1 they are looked at after every step."
        )


class LeakReport(Fields):
    """Every step ended with more memory allocated than the one before."""

    bytes_per_step: Count
    num_steps: Count
    """Over how many consecutive steps it grew."""
    by_category: dict[str, Count] = Field(default_factory=dict[str, Count], max_length=100)
    """The bytes by which each category grew within the last recorded step; empty without a memory history."""
    largest: Allocation | None = None
    """The largest allocation that the last recorded step made and left behind."""


class HardwareSummary(Fields):
    """The device the numbers are for."""

    name: str
    kind: Literal["cuda", "cpu", "table"]
    """cuda and cpu: the device that ran; table: a row of the hardware table."""
    memory_bytes: Count | None = None
    peak_flops: Quantity | None = None
    """Dense FLOP/s in the recipe's compute dtype."""
    memory_bandwidth: Quantity | None = None
    """Bytes per second."""


MOST_RANKS = 10_000


class RankStats(Fields):
    """What one rank saw of a step that several run together."""

    rank: Count
    host: str | None = None
    """Name of its machine."""
    device: str | None = None
    complete: Annotated[bool, Field(strict=True)] = True
    peak_phase: str | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    step_s: Quantity | None = None
    """Median seconds of a step."""
    phases_s: dict[str, Quantity] = Field(default_factory=dict, max_length=100)
    """Median seconds of each phase."""
    communication_s: dict[str, Quantity] = Field(default_factory=dict, max_length=100)
    """Seconds of communication in each phase, as in PhaseStats."""


class RanksReport(Fields):
    """The ranks that ran a step together. The profile that holds it is the one of `peak_rank`."""

    world_size: Count
    peak_rank: Count
    """The rank whose memory peaks highest."""
    ranks: list[RankStats] = Field(default_factory=list[RankStats], max_length=MOST_RANKS)
    """The ranks that left a profile."""
    ended_by: str | None = None
    """Which rank ended all others, and why; null: no rank did."""


class StepProfile(Fields):
    """One answer about one recipe, or what was recorded of a watched command."""

    schema_version: int = SCHEMA_VERSION
    source: Literal["napkin", "simulated", "emulated", "measured"]
    """emulated: run as if measured, on a virtual GPU, without losses and with estimated times."""
    recipe: Details | None = None
    """The full, resolved recipe. null for a watched loop, which has `command`, its words one by one."""
    command: Annotated[list[str], Field(max_length=MAX_DETAILS)] | None = None
    hardware: HardwareSummary
    provenance: Details = Field(default_factory=dict)
    """Commit, versions, driver, allocator settings, time, and what really ran (attention kernel, ...)."""
    complete: Annotated[bool, Field(strict=True)] = True
    """False for a run that was interrupted, ran out of memory or was stopped by a nan loss."""
    memory: MemoryStats
    phases: dict[str, PhaseStats] = Field(default_factory=dict[str, PhaseStats], max_length=100)
    step: StepStats = Field(default_factory=StepStats)
    top: list[Allocation] = Field(default_factory=list[Allocation], max_length=1000)
    """The largest allocations live at the peak."""
    oom: OutOfMemoryReport | None = None
    not_finite: NotFiniteReport | None = None
    leak: LeakReport | None = None
    evaluation: EvaluationStats | None = None
    checkpoint: CheckpointStats | None = None
    ranks: RanksReport | None = None
    """What all ranks of a step on several saw. null: one process, or one rank's own profile."""
    warnings: list[str] = Field(default_factory=list[str], max_length=1000)
    """What differs from the recipe, and what should be known before the numbers are used."""

    @model_validator(mode="after")
    def _is_about_something(self) -> StepProfile:
        if self.recipe is None and self.command is None:
            raise ValueError("it has neither a recipe nor a command")
        return self

    @property
    def subject(self) -> str:
        """What the profile is about: the recipe's model, or the command, its program without the folder."""
        if self.recipe is not None:
            return str(self.recipe.get("model", "-"))
        program, *arguments = self.command or [""]
        return " ".join([PurePath(program).name, *arguments])

    def phase_names(self) -> list[str]:
        """The phases that this profile has, in the order of a step, then those between steps."""
        return [name for name in (*PHASES, *OTHER_PHASES) if name in self.phases]

    def kernels_s(self) -> dict[str, float]:
        """Seconds of a step by class of kernel, the longest first; empty where they are not known."""
        return self._of_the_step(lambda name, stats: stats.kernels_s)

    def modules_s(self) -> dict[str, float]:
        """Seconds of a step by module, layers of one kind together, the longest first; what belongs to the
        model itself or to no module has its phase as a name, "(optimizer_step)". Empty where not known."""
        return self._of_the_step(
            lambda name, stats: {module or f"({name})": taken for module, taken in stats.modules_s.items()}
        )

    def _of_the_step(self, seconds: Callable[[str, PhaseStats], Mapping[str, float]]) -> dict[str, float]:
        """The sums over all phases of a step of what `seconds` gives for each, the largest first."""
        found: Counter[str] = Counter()
        for name in (name for name in PHASES if name in self.phases):
            found.update(seconds(name, self.phases[name]))
        return dict(found.most_common())

    def parts_of_time_s(self) -> dict[str, float]:
        """Seconds of a step by class of kernel, of communication alone ("communication"), and in which the
        device waits for the host or for copies over the link ("idle"). Empty where the kernels are not known.
        Kernels on a second stream run beside others, so that the sum can be more than the step takes."""
        found = self.kernels_s()
        if found:
            steps = [stats for name, stats in self.phases.items() if name in PHASES]
            found["communication"] = sum(stats.communication_s or 0.0 for stats in steps)
            found["idle"] = max(0.0, (self.step.time_s.median or 0.0) - sum(found.values()))
        return {name: seconds for name, seconds in found.items() if seconds}

    def __str__(self) -> str:
        """What `print` shows: the facts alone. `repr` has every field."""
        name = self.provenance.get("recipe_name")
        ended = [] if self.oom is None else [f"  the memory ran out in {self.oom.phase}"]
        facts = [f"  {what}: {value}" for what, value in self._facts().items()]
        head = f"{name if isinstance(name, str) else self.subject} on {self.hardware.name}, {self.source}"
        return "\n".join([head, *ended, *facts])

    def _facts(self) -> dict[str, str]:
        """What is known of memory and time, in words."""
        memory, step = self.memory, self.step
        facts = {
            "peak allocated": in_gib(memory.peak_allocated_bytes),
            "peak reserved": in_gib(memory.peak_reserved_bytes),
            "whole process": in_gib(memory.process_bytes),
            "memory of the device": in_gib(self.hardware.memory_bytes),
            "time of a step": in_ms(step.time_s.median),
            "tokens per second": "-" if step.tokens_per_s is None else f"{step.tokens_per_s:,.0f}",
        }
        return {what: value for what, value in facts.items() if value != "-"}

    def _repr_html_(self) -> str:
        """What a notebook shows: the peak, what is in it, and the phases."""
        about = self.provenance.get("recipe_name")
        name = about if isinstance(about, str) else self.subject
        at_peak = self.memory.at_peak.by_category().items()
        tables: list[Rows] = [
            [(self.source, ""), *self._facts().items()],
            [("at the peak", "bytes"), *((category, in_gib(size)) for category, size in at_peak if size)],
            [
                ("phase", "peak allocated", "time"),
                *(
                    (phase, in_gib(stats.peak_allocated_bytes), in_ms(stats.time_s.median))
                    for phase, stats in self.phases.items()
                ),
            ],
        ]
        notes = [] if self.oom is None else [f"The memory ran out in {self.oom.phase}."]
        if not self.complete and self.oom is None:
            notes.append("The run did not come to its end: these are the steps before that.")
        return notebook_html(f"{name} on {self.hardware.name}", tables, notes + self.warnings)

    def to_json(self) -> str:
        """The profile as an indented JSON document."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, origin: str = "profile") -> StepProfile:
        """Parse a profile. Raises InputError naming `origin` and the first bad field."""
        try:
            document = parse_json(text, MAX_VALUES)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{origin} is not JSON: {error}. Give a profile.json written by harness."
            ) from None
        found = document.get("schema_version") if is_object(document) else None
        if type(found) is not int or found != SCHEMA_VERSION:
            raise InputError(
                f"{origin} has schema_version {found!r:.40}; this version reads {SCHEMA_VERSION}. "
                "Give a profile.json written by this version of harness."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{'.'.join(map(str, first['loc'])):.100}"
            raise InputError(f"{origin}: field {where}: {first['msg']}.") from None

    @classmethod
    def read(cls, path: Path) -> StepProfile:
        """Read a profile.json. Raises InputError if it is missing, unreadable or not a profile."""
        try:
            return cls.from_json(read_whole(path, MAX_FILE_BYTES), str(path))
        except OSError as error:
            raise InputError(f"cannot read the profile {path}: {error.strerror}.") from None
