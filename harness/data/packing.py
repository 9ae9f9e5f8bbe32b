"""Documents into rows of fixed length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Rows of document indices: every document in exactly one row, no row over `seq_len` tokens.

    Best-fit decreasing: longest first, each into the fullest row that still has room for it. Raises
    ValueError for a document longer than a row.
    """
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}  # free tokens -> rows
    rooms: list[int] = []  # the keys of rows_with_room, sorted
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        if length > seq_len:
            raise ValueError(f"document {document} has {length} tokens, a row {seq_len}")
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, seq_len
        else:
            room = rooms[place]
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                del rows_with_room[room], rooms[place]
        rows[row].append(document)
        left = room - length
        if left not in rows_with_room:
            rows_with_room[left] = []
            insort(rooms, left)
        rows_with_room[left].append(row)
    return rows
