"""What a simulated run asks of the allocator, to ask it again: with other memory, settings or sizes."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator
from itertools import count
from typing import Literal, NamedTuple

from harness.allocator import Allocator, AllocatorOutOfMemory, Block

NOBODYS = -(2**62)
"""From here up are keys of what was lost in steps that were made again: no storage has them."""
DIED = -1
"""In the place of a request's bytes: what was born with this key dies."""

Event = tuple[int, int, int]
"""Key, requested bytes and stream of what was born; key, DIED and 0 of what died."""


class Label(NamedTuple):
    """What a request is for."""

    category: str
    module: str
    """Path of the module, layers of one kind alike: model.layers.*.mlp."""
    operator: str


class Mark(NamedTuple):
    """Something between two requests."""

    at: int
    """The index of the event that comes next."""
    what: Literal["phase", "between", "step", "recorded", "emptied"]
    """A phase begins, or ends; a step begins, or the one that is recorded; the cache was emptied."""
    phase: str = ""


class RequestLog:
    """Every birth and death of a run in order, by key, with the phases and the steps that they belong to."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.lost: frozenset[int] = frozenset()
        """Keys of what the recorded step made and nobody frees: each step like it loses as much again."""
        self.refused: int | None = None
        """Which of the events memory ran out at, when they were made again."""

    def mark(self, what: Literal["phase", "between", "step", "recorded", "emptied"], phase: str = "") -> None:
        """Note what happens before the next event."""
        self.marks.append(Mark(len(self.events), what, phase))

    def born(self, key: int, size_bytes: int, stream: int = 0) -> None:
        self.events.append((key, size_bytes, stream))

    def died(self, key: int) -> None:
        self.events.append((key, DIED, 0))

    @property
    def recorded(self) -> int:
        """The mark at which the recorded step begins."""
        return next(n for n, mark in enumerate(self.marks) if mark.what == "recorded")

    @property
    def start(self) -> int:
        """The first event of the recorded step."""
        return self.marks[self.recorded].at

    def found(self) -> dict[int, tuple[int, int]]:
        """Requested bytes and stream of what the recorded step finds, by key, in the order of birth."""
        found: dict[int, tuple[int, int]] = {}
        for key, size, stream in self.events[: self.start]:
            if size == DIED:
                del found[key]
            else:
                found[key] = size, stream
        return found

    def born_in_the_step(self, keys: Container[int]) -> frozenset[int]:
        """Of `keys`, those of what the recorded step made."""
        return frozenset(key for key, size, _ in self.events[self.start :] if size != DIED and key in keys)

    def steady(self) -> dict[int, int] | None:
        """For each key that the recorded step found and freed, the one that it left in its place. None: what
        it leaves, but for what is lost, is not what it found, and no step like it can follow.
        """
        found = self.found()
        step = self.events[self.start :]
        born = {key: (size, stream) for key, size, stream in step if size != DIED}
        died = {key for key, size, _ in step if size == DIED}
        left = [key for key in born if key not in died and key not in self.lost]
        freed = [key for key in found if key in died]
        same = [born[key] for key in left] == [found[key] for key in freed]
        return dict(zip(freed, left, strict=True)) if same else None

    def repeat(
        self, times: int, allocator: Allocator, blocks: dict[int, Block], enter: Callable[[str], None]
    ) -> dict[str, tuple[int, int]]:
        """Make the recorded step's requests again, at most `times`: allocated and reserved bytes at most, by
        phase.

        It ends when a step leaves the blocks that one before it left: those after it go round. A step that is
        not `steady` is not repeated. `blocks` are those by key at its end, and `enter` is told each phase.
        Raises AllocatorOutOfMemory.
        """
        peaks: dict[str, tuple[int, int]] = {}
        left = self.steady()
        if left is None:
            return peaks
        seen: set[Hashable] = set()
        nobodys = count(NOBODYS)
        for _ in range(times):
            state = all_blocks(allocator), tuple(blocks[key].address for key in left.values())
            if state in seen:
                break
            seen.add(state)
            blocks |= {old: blocks.pop(new) for old, new in left.items()}
            blocks |= {next(nobodys): blocks.pop(key) for key in self.lost}
            for phase, allocated, reserved in self.play(self.recorded, None, allocator, blocks, enter):
                before = peaks.get(phase, (0, 0))
                peaks[phase] = max(before[0], allocated), max(before[1], reserved)
        return peaks

    def play(
        self,
        first: int,
        end: int | None,
        allocator: Allocator,
        blocks: dict[int, Block],
        enter: Callable[[str], None],
    ) -> Iterator[tuple[str, int, int]]:
        """Make the requests from mark `first` to mark `end` (None: to the last): the name of each phase once
        it is over, with its largest allocated and reserved bytes. `enter` is told each phase. Raises
        AllocatorOutOfMemory, and `refused` says where.
        """
        marks = self.marks[first:end]
        ends = [mark.at for mark in self.marks[first + 1 : end]]
        ends.append(len(self.events) if end is None else self.marks[end].at)
        now = sum(block.size for block in blocks.values())
        phase, peak = "", 0
        for mark, last in zip(marks, ends, strict=True):
            if mark.what == "emptied":
                allocator.empty_cache()
            elif mark.what in ("phase", "between"):
                if phase:
                    yield phase, peak, allocator.peak_reserved_bytes
                phase, peak = mark.phase, now
                if phase:
                    enter(phase)
            now, peak = self._ask(mark.at, last, allocator, blocks, now, peak)
        if phase:
            yield phase, peak, allocator.peak_reserved_bytes

    def _ask(
        self, start: int, end: int, allocator: Allocator, blocks: dict[int, Block], now: int, peak: int
    ) -> tuple[int, int]:
        """Bytes that are allocated after these events, and at most, given what was before."""
        malloc, free, pop = allocator.malloc, allocator.free, blocks.pop
        for key, size_bytes, stream in self.events[start:end]:
            if size_bytes < 0:
                block = pop(key)
                now -= block.size
                free(block)
                continue
            try:
                block = blocks[key] = malloc(int(size_bytes), stream)  # without its rule
            except AllocatorOutOfMemory:
                self.refused = self.events.index((key, size_bytes, stream), start, end)
                raise
            now += block.size
            if now > peak:
                peak = now
        return now, peak


def all_blocks(allocator: Allocator) -> tuple[tuple[int, int, bool], ...]:
    """(address, size, allocated) of every block: equal states do the same with equal requests."""
    segments = allocator.device.segments.values()
    blocks = (block for segment in segments for block in segment.blocks())
    return tuple((block.address, block.size, block.allocated) for block in blocks)
