"""Offloaded activations that are on the device: those on their way out in forward, and fetched in backward.

The rules are those of the hooks in training/toggles/offload_activations.py, which see each saved memory once,
however many operators save it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.napkin.tape.tape import Op, Tensor

IN_FLIGHT = 2
"""Offloaded activations on their way out, or fetched ahead (training/toggles/offload_activations.py)."""
MIN_OFFLOAD_BYTES = 4096
"""What is smaller stays on the device."""


@dataclass(frozen=True)
class InFlight:
    """With offloaded activations: how many tensors are on the device on their way out, or ahead of their use,
    and the bytes of the last that the stages before have saved, the very last first."""

    count: int
    before: Sequence[int] = ()


class Leaving:
    """The tensors on their way out while a stage's forward runs."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._sent: set[int] = set()
        self.last: dict[int, int] = {}
        """Bytes of those of the stage, by the id of their storage."""

    def send(self, storages: Sequence[Tensor], apart: set[int]) -> None:
        """Those of `storages` go out that have not gone yet and whose id is not in `apart`."""
        new = {id(t): t.size_bytes for t in storages if id(t) not in apart | self._sent}
        self._sent |= new.keys()
        self.last = dict([*self.last.items(), *new.items()][-self._in_flight.count :])

    @property
    def before_bytes(self) -> int:
        """Of those that the stages before have saved."""
        return sum(self._in_flight.before[: self._in_flight.count - len(self.last)])


class Fetched:
    """The tensors that have come back while a stage's backward runs, each before its use and a few ahead."""

    def __init__(self, in_flight: InFlight, ops: Sequence[Op], apart: set[int]) -> None:
        """What is first on the device are the last that were saved, as they are after forward."""
        own = {id(t): t for op in ops for t in hooked(op) if id(t) not in apart}
        self._count = in_flight.count
        self._sizes = [*reversed(in_flight.before), *(t.size_bytes for t in own.values())]
        self._places = {key: len(in_flight.before) + n for n, key in enumerate(own)}
        self._used: set[int] = set()
        self._ahead = set(range(len(self._sizes))[-self._count :])

    def while_running(self, op: Op) -> int:
        """Bytes on the device while the backward of `op` runs, which is then over."""
        in_use = hooked(op)
        for t in in_use:
            if id(t) in self._places:
                place = self._places[id(t)]
                self._used.add(place)
                self._ahead |= set(range(max(place - self._count, 0), place))
                self._ahead -= self._used
        return self.ahead_bytes + sum(t.size_bytes for t in in_use)

    @property
    def ahead_bytes(self) -> int:
        """Of those that are there before their use."""
        return sum(self._sizes[place] for place in self._ahead)


def hooked(op: Op) -> list[Tensor]:
    """The storages that are offloaded for `op`, in order; what is kept in attributes no hook sees."""
    return offloaded([t for t in op.saved if t not in op.kept_by_ctx])


def offloaded(saved: Sequence[Tensor]) -> list[Tensor]:
    """Of the memory of `saved`, in order, what does not stay."""
    return [t for t in storages_of(saved) if t.size_bytes >= MIN_OFFLOAD_BYTES]


def storages_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The distinct memory of `tensors`, in order."""
    return list({id(t.storage): t.storage for t in tensors}.values())
