"""The segments of the caching allocator as a table: what of them is in use. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.report.table import Cell, Table
from harness.snapshot import Piece, Segment, free_stretches

MOST_SEGMENTS = 16
"""Drawn: those with the most free memory in them."""
MOST_PIECES = 400
"""Stretches drawn of one segment."""


def segments_with_most_free(used: Sequence[tuple[Segment, list[Piece]]]) -> list[dict[str, Any]]:
    """What is drawn: the segments with free memory, those that look alike counted together, the most first.

    `used` is what `pieces_in_use` gives; sizes and places are bytes, `free` is that of one of `count`.
    """
    alike: Counter[tuple[str, int, tuple[Piece, ...]]] = Counter(
        (segment.kind, segment.size_bytes, tuple(pieces)) for segment, pieces in used
    )
    found: list[dict[str, Any]] = [
        {
            "kind": kind,
            "size": size,
            "count": count,
            "free": size - sum(length for _, length in pieces),
            "used": pieces[:MOST_PIECES],
        }
        for (kind, size, pieces), count in alike.items()
    ]
    with_free = [segment for segment in found if segment["free"]]
    return sorted(with_free, key=lambda segment: -segment["free"] * segment["count"])[:MOST_SEGMENTS]


def segment_table(used: Sequence[tuple[Segment, list[Piece]]], when: str = "at the peak") -> Table:
    """By kind: how many segments, what of them is allocated, and the largest stretch that is free."""
    rows: list[Sequence[Cell]] = []
    for kind in ("small", "large", "expandable"):
        of_kind = [(segment, pieces) for segment, pieces in used if segment.kind == kind]
        if of_kind:
            rows.append(_row(kind, of_kind))
    if len(rows) > 1:
        rows.append(_row("all", list(used)))
    columns = ("segments", "count", "reserved", "allocated", "free in them", "largest free stretch")
    return Table(f"Segments {when}", columns, rows)


def _row(name: str, used: Sequence[tuple[Segment, list[Piece]]]) -> Sequence[Cell]:
    reserved = sum(segment.size_bytes for segment, _ in used)
    allocated = sum(piece.size_bytes for _, pieces in used for piece in pieces)
    free = max((gap for segment, pieces in used for gap in free_stretches(segment, pieces)), default=0)
    sizes = (reserved, allocated, reserved - allocated, free)
    return Cell(name), Cell(len(used), "number"), *(Cell(size, "bytes") for size in sizes)
