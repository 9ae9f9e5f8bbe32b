"""How long a rank waits for the others in each phase, from PyTorch's profiler over one more step.

gloo's collectives are events of the profiler, from when the backend begins one to when it is done. While one
is in flight and no operator runs, the rank only communicates, or waits for a rank that is late. This holds
for FSDP2, DDP and DTensor alike: nothing of theirs is replaced or wrapped.

NCCL's collectives run on streams of the GPU, where waiting is another question: they are not measured here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch.profiler import ProfilerActivity, profile, record_function

from harness.snapshot import without

PHASE = "harness phase: "
"""The beginning of the names of our own profiler ranges, one for each phase."""
Interval = tuple[float, float]
"""Begin and end of an event, in the events' own unit."""


class Communication:
    """A LoopObserver (training/loop.py) of one step, and the context around it that sets `seconds`."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self.seconds: dict[str, float] = {}
        """By phase, the seconds in which a collective was in flight and no operator ran."""

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        if exception[0] is None:
            events = self._profile.events() or ()
            named = ((event.name, (event.time_range.start, event.time_range.end)) for event in events)
            self.seconds = {phase: micros / 1e6 for phase, micros in waiting(named).items()}

    def begin_step(self, index: int, kind: str) -> None:
        """See LoopObserver."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with record_function(PHASE + name):
            yield


def waiting(events: Iterable[tuple[str, Interval]]) -> dict[str, float]:
    """By phase, how long a collective was in flight and no operator ran, in the events' own unit."""
    phases: dict[str, list[Interval]] = {}
    in_flight, operators, waits = [], [], []
    for name, interval in events:
        if name.startswith(PHASE):
            phases.setdefault(name.removeprefix(PHASE), []).append(interval)
        elif name.startswith("gloo:"):
            in_flight.append(interval)
        elif name.startswith("aten::"):
            operators.append(interval)
        elif name == "_c10d_functional::wait_tensor":  # within the operator that needs the result
            waits.append(interval)
    idle = without(in_flight, without(operators, waits))
    return {
        name: sum(end - begin for begin, end in idle) - sum(end - begin for begin, end in without(idle, own))
        for name, own in phases.items()
    }
