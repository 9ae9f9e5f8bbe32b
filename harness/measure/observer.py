"""The protocol of what measures a run: there is an observer for each kind of device (cpu.py, cuda.py)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from harness.observe import Owner, PhasePeaks
from harness.recipe import Recipe
from harness.snapshot import AllocationSpan
from harness.step_profile import HardwareSummary, MemoryStats, OutOfMemoryReport, PhaseStats
from harness.training import HostPeak, Kind, LoopObserver

Advise = Callable[[Recipe, HardwareSummary, OutOfMemoryReport], list[str]]
"""Gives lines on what to change when a device's memory ran out, the cheapest first (fit/advice.py)."""


class Progress(Protocol):
    """What is told about every finished step (cli/terminal/profile_tables.py)."""

    def step(
        self,
        index: int,
        total: int,
        kind: Kind,
        loss: float | None,
        tokens_per_s: float | None,
        peak_bytes: int | None,
    ) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def step(self, *_: Any, **__: Any) -> None:
        """See Progress."""


class History(NamedTuple):
    """The allocations of the recorded steps."""

    spans: list[AllocationSpan]
    snapshot: dict[str, Any]
    """The same as a memory-viz snapshot."""
    step_ends: list[int]
    """The index of each recorded step's last event, as `born` and `died` of the spans count."""
    steps: Sequence[int] = ()
    """The numbers of the recorded steps, from 0."""
    ran_out: int | None = None
    """The index of the last event before memory ran out, if it did while every allocation was recorded."""
    highest: tuple[int, str] = (0, "")
    """The most bytes allocated in training since the recording began, by the allocator's counter, and the
    phase; 0 where there is no counter."""


class DeviceObserver(LoopObserver, Protocol):
    """What measures on one kind of device and is then asked for its results. The bodies here are the answers
    of an observer that cannot know.
    """

    times_s: list[dict[str, float]]
    """For every step begun, seconds by phase and of the whole "step"; empty if the step was not timed."""
    peaks: PhasePeaks

    def trained(self, training: Owner) -> None:
        """Note that setup is done, and what it built."""

    def label(self, category: str, tensor: Tensor) -> None:
        """Label the memory of `tensor` as `category`, unless it has a label already."""

    def end_step(self, running: int = 0) -> None:
        """The step's work is queued: note the times of those steps that the device has finished.

        Waits until it has finished all but `running` steps, whose times are noted at a later call.
        """

    def step_end_bytes(self) -> list[int]:
        """Allocated bytes at the end of each timed step; empty where they are not counted."""
        return []

    def peak_bytes(self) -> int | None:
        """The largest allocated bytes of any training step so far, without evaluation, generation and saving;
        None where it is not known.
        """

    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved bytes of any step so far; None where nothing is reserved."""

    def phase_memory(self) -> dict[str, PhaseStats]:
        """Peaks, and the bytes at the end, of each phase of the recorded steps; without times."""
        return self.peaks.phases

    def apart_memory(self) -> dict[str, PhaseStats]:
        """The same for evaluation, generation and saving in steps that were not recorded."""
        return self.peaks.apart

    def memory(self) -> MemoryStats:
        """What is known of the memory without the history."""
        ...

    def host_peak(self) -> HostPeak:
        """A context around code that puts tensors into host memory. It yields a function that gives the
        bytes, or None where they are not counted."""
        return nullcontext(lambda: None)

    def history(self) -> History:
        """Every allocation since recording began; empty where nothing was recorded."""
        ...

    def shortage(self, phase: str, error: BaseException) -> OutOfMemoryReport:
        """A report on the allocation that has just failed with `error` in `phase`."""
        ...

    def hardware(self, dtype: str) -> HardwareSummary:
        """The device, with its ceilings in `dtype` (fp32, bf16, fp16) if they are known."""
        ...

    def facts(self) -> dict[str, Any]:
        """Facts about the device and this process for the profile's provenance."""
        ...

    def utilization(self) -> float | None:
        """Mean busy fraction of the device over the timed steps, 0 to 1."""


class Unobserved:
    """A LoopObserver that observes nothing, for the bare steps."""

    def begin_step(self, index: int, kind: Kind) -> None:
        """See LoopObserver (training/loop.py)."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()
