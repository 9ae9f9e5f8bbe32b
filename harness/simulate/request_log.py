"""The requests of one step, to make them of the allocator again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from itertools import count

from harness.allocator import Allocator, AllocatorOutOfMemory, Block

NOBODYS = -(2**62)
"""From here up are keys of what was lost in steps that were made again: no storage has them."""


class RequestLog:
    """What was born and what died since the log began, by key, and in which phase."""

    def __init__(self, blocks: dict[int, Block]) -> None:
        self._found = {key: (block.requested_size, block.pool.stream) for key, block in blocks.items()}
        """Requested bytes and stream of what was live at the beginning, in the order of birth."""
        self._events: list[tuple[int, int, int]] = []
        """Key, requested bytes and stream of what was born; key, -1 and 0 of what died."""
        self._phases: list[tuple[int, str]] = []
        """Where in `_events` each phase begins, and where "" what lies between two of them."""
        self.refused: int | None = None
        """Which of the events memory ran out at, when they were made again."""

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._phases.append((len(self._events), phase))

    def end(self) -> None:
        """What comes belongs to no phase."""
        self._phases.append((len(self._events), ""))

    def born(self, key: int, size_bytes: int, stream: int = 0) -> None:
        self._events.append((key, size_bytes, stream))

    def died(self, key: int) -> None:
        self._events.append((key, -1, 0))

    def steady(self, lost: Container[int] = ()) -> dict[int, int] | None:
        """For each key that the step found and freed, the one that it left in its place. None: what it
        leaves, but for what is `lost`, is not what it found, and no step like it can follow.
        """
        born = {key: (size, stream) for key, size, stream in self._events if size >= 0}
        died = {key for key, size, _ in self._events if size < 0}
        left = [key for key in born if key not in died and key not in lost]
        freed = [key for key in self._found if key in died]
        same = [born[key] for key in left] == [self._found[key] for key in freed]
        return dict(zip(freed, left, strict=True)) if same else None

    def repeat(
        self,
        times: int,
        allocator: Allocator,
        blocks: dict[int, Block],
        enter: Callable[[str], None],
        lost: Collection[int] = (),
    ) -> dict[str, tuple[int, int]]:
        """Make the step's requests again, at most `times`: allocated and reserved bytes at most, by phase.

        It ends when a step leaves the blocks it found; a step that is not `steady` is not repeated. `blocks`
        are those by key at its end, and `enter` is told each phase. What the step made and nobody frees is
        `lost`: each step loses as much again. Raises AllocatorOutOfMemory.
        """
        peaks: dict[str, tuple[int, int]] = {}
        lost = {key for key, size, _ in self._events if size >= 0 and key in lost}
        left = self.steady(lost)
        state = None if left is None else all_blocks(allocator)
        nobodys = count(NOBODYS)
        for _ in range(times if left is not None else 0):
            blocks |= {old: blocks.pop(new) for old, new in (left or {}).items()}
            blocks |= {next(nobodys): blocks.pop(key) for key in lost}
            self._once(allocator, blocks, enter, peaks)
            before, state = state, all_blocks(allocator)
            if state == before:
                break
        return peaks

    def _once(
        self,
        allocator: Allocator,
        blocks: dict[int, Block],
        enter: Callable[[str], None],
        peaks: dict[str, tuple[int, int]],
    ) -> None:
        now = sum(block.size for block in blocks.values())
        ends = [start for start, _ in self._phases[1:]] + [len(self._events)]
        for (start, phase), end in zip(self._phases, ends, strict=True):
            if phase:
                enter(phase)
            peak = now
            for index, (key, size_bytes, stream) in enumerate(self._events[start:end], start):
                if size_bytes < 0:
                    block = blocks.pop(key)
                    now -= block.size
                    allocator.free(block)
                    continue
                try:
                    block = blocks[key] = allocator.malloc(size_bytes, stream)
                except AllocatorOutOfMemory:
                    self.refused = index
                    raise
                now += block.size
                peak = max(peak, now)
            if not phase:
                continue
            allocated, reserved = peaks.get(phase, (0, 0))
            peaks[phase] = max(allocated, peak), max(reserved, allocator.peak_reserved_bytes)


def all_blocks(allocator: Allocator) -> list[tuple[int, int, bool]]:
    """(address, size, allocated) of every block: equal states do the same with equal requests."""
    found = []
    for segment in allocator.device.segments.values():
        block: Block | None = segment.head
        while block is not None:
            found.append((block.address, block.size, block.allocated))
            block = block.next
    return found
