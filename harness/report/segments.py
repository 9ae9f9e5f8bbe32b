"""The segments of the caching allocator as a table: what of them is in use. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.table import Cell, Table
from harness.snapshot import Piece, Segment, free_stretches


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
