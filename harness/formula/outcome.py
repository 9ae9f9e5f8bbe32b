"""The outcome of a run's requests on one device: its peaks by phase, or where memory runs out. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.allocator import Allocator, AllocatorOutOfMemory, Block, Settings
from harness.formula.request_log import DIED, RequestLog

ROUNDED_TO = 512
"""Bytes: every block is a multiple of it (kMinBlockSize of PyTorch's allocator)."""


@dataclass
class Outcome:
    """The peaks of a run in bytes. A peak is None where memory ran out before it could be seen."""

    setup_bytes: int | None = None
    """Peak allocated bytes of the setup."""
    first_step_bytes: int | None = None
    """Peak allocated bytes of the first step, which makes the optimizer's state."""
    phases: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Peak allocated and peak reserved bytes of each phase of the measured steps."""
    phase: str = "setup"
    """The phase that was entered last."""
    out_of_memory: AllocatorOutOfMemory | None = None
    """The request that failed; None where everything fitted."""
    most_used_bytes: int | None = None
    """The most memory of the device that was held at once; None where any was refused, and in older files."""

    @property
    def allocated_bytes(self) -> int:
        """Peak allocated bytes of the measured steps."""
        return max((allocated for allocated, _ in self.phases.values()), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Peak reserved bytes of the measured steps."""
        return max((reserved for _, reserved in self.phases.values()), default=0)

    @property
    def peak_phase(self) -> str | None:
        """The phase with the largest allocated peak, and the first of several with the same."""
        return max(self.phases, key=lambda name: self.phases[name][0], default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        error = self.out_of_memory
        return {
            "setup": self.setup_bytes,
            "first": self.first_step_bytes,
            "phases": self.phases,
            "phase": self.phase,
            "out_of_memory": error and error.numbers,
            "most_used": self.most_used_bytes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Outcome:
        """What `as_json` wrote."""
        phases = {name: (allocated, reserved) for name, (allocated, reserved) in document["phases"].items()}
        numbers = document["out_of_memory"]
        error = AllocatorOutOfMemory(*numbers) if numbers else None
        most = document.get("most_used")
        return cls(document["setup"], document["first"], phases, document["phase"], error, most)

    def note(self, phase: str, allocated: int, reserved: int) -> None:
        """Raise the peaks of `phase` to those of another time through it, where these are larger."""
        before = self.phases.get(phase, (0, 0))
        self.phases[phase] = max(before[0], allocated), max(before[1], reserved)


def outcome(
    log: RequestLog,
    settings: Settings,
    capacity_bytes: int | None,
    device_bytes: int | None = None,
    repeats: int = 0,
) -> Outcome:
    """Replay all requests of `log` on an allocator with `capacity_bytes` (None: no limit).

    `device_bytes` is the device's total memory (None: the capacity). The recorded step is replayed `repeats`
    times more, or fewer when its blocks no longer change.
    """
    allocator = Allocator(settings, capacity_bytes, device_bytes)
    blocks: dict[int, Block] = {}
    found = Outcome()

    def enter(phase: str) -> None:
        found.phase = phase
        reserved = allocator.device.reserved_bytes
        reserved.peak = reserved.current

    steps = [n for n, mark in enumerate(log.marks) if mark.what == "step"]
    second = steps[1] if len(steps) > 1 else log.recorded
    try:
        for _, allocated, _ in log.play(0, steps[0], allocator, blocks, enter):
            found.setup_bytes = allocated
        for _, allocated, _ in log.play(steps[0], second, allocator, blocks, enter):
            found.first_step_bytes = max(found.first_step_bytes or 0, allocated)
        for _ in log.play(second, log.recorded, allocator, blocks, enter):
            pass
        for name, allocated, reserved in log.play(log.recorded, None, allocator, blocks, enter):
            found.note(name, allocated, reserved)
        for name, (allocated, reserved) in log.repeat(repeats, allocator, blocks, enter).items():
            found.note(name, allocated, reserved)
    except AllocatorOutOfMemory as error:
        found.out_of_memory = error
    if not allocator.device.has_refused:
        found.most_used_bytes = allocator.device.most_used_bytes
    return found


def least_bytes(log: RequestLog) -> int:
    """Peak bytes of the requests if memory never fragmented. A device with less cannot run the step.

    It takes a tenth of the time of `outcome`.
    """
    sizes: dict[int, int] = {}
    now = peak = 0
    for key, size_bytes, _ in log.events:
        if size_bytes == DIED:
            now -= sizes.pop(key)
            continue
        sizes[key] = size = -(-size_bytes // ROUNDED_TO) * ROUNDED_TO
        now += size
        if now > peak:
            peak = now
    return peak


def kept_bytes(log: RequestLog) -> int:
    """Requested bytes that are allocated when the recorded step begins: weights, optimizer state, and all
    else that stays from step to step."""
    return sum(size for size, _ in log.found().values())
