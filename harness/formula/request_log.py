"""The log of a simulated run's requests to the allocator, which can be replayed.

The replay may have less memory, other allocator settings or other request sizes than the run had. An
allocation is called a birth here, and the free that ends it a death.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

from harness.allocator import Allocator, AllocatorOutOfMemory, Block

FIRST_LOST_KEY = -(2**62)
"""Memory that a replayed step loses gets keys counted up from this one, which no storage of a run has."""
DIED = -1
"""Stands in an event where the requested bytes would be, and says that the event is a free."""

BIRTH = -1
"""Stands in a list of births and deaths for a birth. Any other number in it is a death, and is the number of
the birth that it ends, counted from 0."""

Event = tuple[int, int, int]
"""One request. An allocation is (key, requested bytes, CUDA stream), and a free is (key, DIED, 0). A key
belongs to one allocation and its free."""


class Label(NamedTuple):
    """What an allocation is for."""

    category: str
    """A category of memory in a StepProfile, such as `gradients` (CATEGORIES in step_profile)."""
    module: str
    """The path of the module that made it, with a star for the number of a layer: model.layers.*.mlp."""
    operator: str
    """The PyTorch operator that made it."""
    element_bytes: int = 0
    """Bytes of one number of the tensor that it was made for; 0 for what a kernel takes for itself."""


class Mark(NamedTuple):
    """Something that happened between two requests."""

    at: int
    """The index of the event that follows."""
    what: Literal["phase", "between", "step", "recorded", "emptied"]
    """`phase`: a phase begins. `between`: a phase ends. `step`: a step begins. `recorded`: the recorded step
    begins. `emptied`: the allocator's cache was emptied."""
    phase: str = ""
    """The name of the phase that begins; empty for every other mark."""


class RequestLog:
    """Every allocation and free of a run, in order, with marks where its phases and steps begin.

    The last step of a run is its recorded step: the steady one that its peak is taken from.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.lost: frozenset[int] = frozenset()
        """Keys of what the recorded step allocates and nobody ever frees: each step like it leaks as much."""
        self.refused: int | None = None
        """The index of the event at which a replay ran out of memory; None where none did."""

    def mark(self, what: Literal["phase", "between", "step", "recorded", "emptied"], phase: str = "") -> None:
        """Note what happens before the next event."""
        self.marks.append(Mark(len(self.events), what, phase))

    def born(self, key: int, size_bytes: int, stream: int = 0) -> None:
        """Log an allocation of `size_bytes` on a CUDA stream."""
        self.events.append((key, size_bytes, stream))

    def died(self, key: int) -> None:
        """Log the free of the allocation with this key."""
        self.events.append((key, DIED, 0))

    def numbered(self) -> list[int]:
        """The events as births and deaths."""
        numbers: dict[int, int] = {}
        found: list[int] = []
        for key, size, _ in self.events:
            if size == DIED:
                found.append(numbers[key])
            else:
                numbers[key] = len(numbers)
                found.append(BIRTH)
        return found

    @property
    def has_step(self) -> bool:
        """Whether the recorded step began: it does not where its inputs alone are too large."""
        return any(mark.what == "recorded" for mark in self.marks)

    @property
    def recorded(self) -> int:
        """The index of the mark at which the recorded step begins."""
        return next(n for n, mark in enumerate(self.marks) if mark.what == "recorded")

    @property
    def start(self) -> int:
        """The index of the first event of the recorded step."""
        return self.marks[self.recorded].at

    def found(self) -> dict[int, tuple[int, int]]:
        """What is allocated when the recorded step begins: by key, in order of allocation, the requested
        bytes and the stream."""
        found: dict[int, tuple[int, int]] = {}
        for key, size, stream in self.events[: self.start]:
            if size == DIED:
                del found[key]
            else:
                found[key] = size, stream
        return found

    def born_in_the_step(self, keys: Container[int]) -> frozenset[int]:
        """Those of `keys` that the recorded step allocated."""
        return frozenset(key for key, size, _ in self.events[self.start :] if size != DIED and key in keys)

    def steady(self) -> dict[int, int] | None:
        """Each key that the recorded step found and freed, with the key of the allocation it left instead.

        None where what the step leaves (leaks aside) differs in sizes or streams from what it found, so that
        no step like it can follow.
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
        """Replay the recorded step at most `times` times. Returns each phase's allocated and reserved peak.

        The replay ends early when a step leaves the same blocks as an earlier one, since the steps after it
        would only go round. A step that is not `steady` is not repeated. `blocks` are the blocks by key at
        the end of the step, and `enter` is called with the name of each phase. Raises AllocatorOutOfMemory.
        """
        peaks: dict[str, tuple[int, int]] = {}
        left = self.steady()
        if left is None:
            return peaks
        seen: set[Hashable] = set()
        lost_keys = count(FIRST_LOST_KEY)
        for _ in range(times):
            state = all_blocks(allocator), tuple(blocks[key].address for key in left.values())
            if state in seen:
                break
            seen.add(state)
            blocks |= {old: blocks.pop(new) for old, new in left.items()}
            blocks |= {next(lost_keys): blocks.pop(key) for key in self.lost}
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
        """Make the requests from mark `first` up to mark `end` (None: to the end of the log).

        Yields each phase when it is over: its name, its peak allocated and its peak reserved bytes. `enter`
        is called with the name of each phase that begins. Raises AllocatorOutOfMemory, after setting
        `refused`.
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
        """Make the requests of events `start` to `end`. Given the allocated bytes `now` and the `peak` so
        far, returns both as they are afterwards."""
        malloc, free, pop = allocator.malloc, allocator.free, blocks.pop
        for key, size_bytes, stream in self.events[start:end]:
            if size_bytes < 0:
                block = pop(key)
                now -= block.size
                free(block)
                continue
            try:
                block = blocks[key] = malloc(int(size_bytes), stream)  # a plain int: it may be a Ruled
            except AllocatorOutOfMemory:
                self.refused = self.events.index((key, size_bytes, stream), start, end)
                raise
            now += block.size
            if now > peak:
                peak = now
        return now, peak


def settled(events: Sequence[int], marks: Sequence[Mark]) -> list[int]:
    """Births and deaths, with deaths that follow one another in the order of their births.

    In which order they happen decides nothing: the same blocks are free after them. And it is not the same in
    deeper models, since Python puts off what it would have to free in too deep a recursion.
    """
    borders = {mark.at for mark in marks}
    found: list[int] = []
    deaths: list[int] = []
    for n, event in enumerate(events):
        if event == BIRTH or n in borders:
            found += sorted(deaths)
            deaths.clear()
        (found if event == BIRTH else deaths).append(event)
    return found + sorted(deaths)


def all_blocks(allocator: Allocator) -> tuple[tuple[int, int, bool], ...]:
    """(address, size, allocated) of every block. Allocators whose blocks are equal answer equally."""
    segments = allocator.device.segments.values()
    blocks = (block for segment in segments for block in segment.blocks())
    return tuple((block.address, block.size, block.allocated) for block in blocks)
