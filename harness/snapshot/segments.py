"""The segments of the caching allocator at one moment of a recording, and what of them is in use.

A snapshot has the segments after its last event; here the events since the moment are undone.
Imports no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from harness.allocator import kSmallBuffer
from harness.snapshot.spans import AllocationSpan

_Number = TypeVar("_Number", int, float)


class Segment(NamedTuple):
    """Memory that the allocator took from the device in one piece, or mapped."""

    address: int
    size_bytes: int
    expandable: bool

    @property
    def kind(self) -> str:
        """small, for requests of up to 1 MiB; large, for larger ones; expandable, for any of one stream."""
        if self.expandable:
            return "expandable"
        return "small" if self.size_bytes == kSmallBuffer else "large"


class Piece(NamedTuple):
    """An allocated stretch of a segment; `start_bytes` counts from where the segment begins."""

    start_bytes: int
    size_bytes: int


def segments_at(
    trace: Sequence[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]], moment: int
) -> list[Segment]:
    """The segments right after trace entry `moment` (-1: before the first), by address.

    What was unmapped or mapped of an expandable segment is a segment by itself unless it touches another.
    """
    whole: dict[int, int] = {}
    mapped: list[tuple[int, int]] = []
    for segment in segments:
        if segment.get("is_expandable"):
            mapped.append((segment["address"], segment["address"] + segment["total_size"]))
        else:
            whole[segment["address"]] = segment["total_size"]
    for entry in reversed(trace[moment + 1 :]):
        action, size = entry["action"], entry["size"]
        if action == "segment_alloc":
            whole.pop(entry["addr"], None)
        elif action == "segment_free":
            whole[entry["addr"]] = size
        elif action == "segment_map":
            mapped = without(mapped, [(entry["addr"], entry["addr"] + size)])
        elif action == "segment_unmap":
            mapped.append((entry["addr"], entry["addr"] + size))
    found = [Segment(address, size, False) for address, size in whole.items()]
    found += [Segment(start, end - start, True) for start, end in joined(mapped)]
    return sorted(found)


def pieces_in_use(
    segments: Sequence[Segment], live: Iterable[AllocationSpan]
) -> list[tuple[Segment, list[Piece]]]:
    """Each segment with its allocated stretches, by address; neighbours are one stretch."""
    blocks = sorted((span.address, span.address + span.size_bytes) for span in live)
    found: list[tuple[Segment, list[Piece]]] = []
    i = 0
    for segment in segments:
        end = segment.address + segment.size_bytes
        while i < len(blocks) and blocks[i][0] < segment.address:
            i += 1
        inside: list[tuple[int, int]] = []
        while i < len(blocks) and blocks[i][0] < end:
            inside.append((blocks[i][0], min(blocks[i][1], end)))
            i += 1
        found.append(
            (segment, [Piece(start - segment.address, stop - start) for start, stop in joined(inside)])
        )
    return found


def free_stretches(segment: Segment, pieces: Sequence[Piece]) -> Iterable[int]:
    """The size in bytes of each stretch before, between and after `pieces`, by address; some may be 0."""
    position = 0
    for start, size in pieces:
        yield start - position
        position = start + size
    yield segment.size_bytes - position


def joined(intervals: Iterable[tuple[_Number, _Number]]) -> list[tuple[_Number, _Number]]:
    """The intervals (begin, end) in order, with those that overlap or touch each other merged into one."""
    found: list[tuple[_Number, _Number]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def without(
    intervals: Iterable[tuple[_Number, _Number]], taken: Iterable[tuple[_Number, _Number]]
) -> list[tuple[_Number, _Number]]:
    """The parts of `intervals` that lie outside `taken`, in order; both hold (begin, end)."""
    remaining: list[tuple[_Number, _Number]] = []
    cuts = joined(taken)
    first = 0
    for begin, end in joined(intervals):
        while first < len(cuts) and cuts[first][1] <= begin:
            first += 1
        for cut_begin, cut_end in cuts[first:]:
            if cut_begin >= end:
                break
            if cut_begin > begin:
                remaining.append((begin, cut_begin))
            begin = max(begin, cut_end)
        if begin < end:
            remaining.append((begin, end))
    return remaining
