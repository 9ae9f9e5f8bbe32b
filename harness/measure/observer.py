"""What watches a measured run: one observer for each kind of device (measure/cpu.py, measure/cuda.py)."""

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
"""What to change when the memory of a device ran out, a line each, the cheapest first (fit/advice.py)."""


class Progress(Protocol):
    """Who is told about every finished step (cli/terminal/profile_tables.py)."""

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
    """Every allocation that was recorded."""

    spans: list[AllocationSpan]
    snapshot: dict[str, Any]
    """The same for memory-viz."""
    step_ends: list[int]
    """The index, in the spans, of each recorded step's last event."""
    steps: Sequence[int] = ()
    """Which steps these are."""
    ran_out: int | None = None
    """The index of the last event before memory ran out, if it did while every allocation was recorded."""
    highest: tuple[int, str] = (0, "")
    """The most bytes allocated in training since the recording began, as the allocator counts, and the phase;
    0 where nobody counts beside the history."""


class DeviceObserver(LoopObserver, Protocol):
    """What measures on one kind of device, and can be asked what it saw. Most answers of one that cannot tell
    stand here.
    """

    times_s: list[dict[str, float]]
    """A dict for every step begun: seconds by phase, and of the whole "step"; empty if it was not timed."""
    peaks: PhasePeaks

    def trained(self, training: Owner) -> None:
        """Setup is done, and this is what it built."""

    def label(self, category: str, tensor: Tensor) -> None:
        """`tensor` is `category`, if it was not said to be anything before."""

    def end_step(self, running: int = 0) -> None:
        """The step's work is queued: note the times of the steps that are done.

        Waits until at most `running` of them are not; their times are noted at a later end.
        """

    def step_end_bytes(self) -> list[int]:
        """Allocated bytes when each timed step had ended; empty where nobody counts them."""
        return []

    def peak_bytes(self) -> int | None:
        """The largest allocated bytes of any training step so far, without evaluation, generation and saving;
        None where it is not known.
        """

    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved bytes of any step so far; None where nothing is reserved."""

    def phase_memory(self) -> dict[str, PhaseStats]:
        """Peaks and final bytes of the recorded steps' phases; no times."""
        return self.peaks.phases

    def apart_memory(self) -> dict[str, PhaseStats]:
        """The same of evaluation, generation and saving in steps that were not recorded."""
        return self.peaks.apart

    def memory(self) -> MemoryStats:
        """All that is known without the history."""
        ...

    def host_peak(self) -> HostPeak:
        """To be entered around what puts tensors into host memory; tells nothing where nobody counts it."""
        return nullcontext(lambda: None)

    def history(self) -> History:
        """Every allocation since recording began; empty where nobody recorded."""
        ...

    def shortage(self, phase: str, error: BaseException) -> OutOfMemoryReport:
        """What the device says about an allocation that failed just now."""
        ...

    def hardware(self, dtype: str) -> HardwareSummary:
        """The device, with its ceilings in `dtype` (fp32, bf16, fp16) if they are known."""
        ...

    def facts(self) -> dict[str, Any]:
        """What more belongs into the provenance."""
        ...

    def utilization(self) -> float | None:
        """Mean busy fraction of the device over the timed steps, 0 to 1."""


class Unobserved:
    """A LoopObserver that looks at nothing: the bare steps."""

    def begin_step(self, index: int, kind: Kind) -> None:
        """See LoopObserver (training/loop.py)."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()
