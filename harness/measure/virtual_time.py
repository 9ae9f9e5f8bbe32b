"""Gives a memory trace the times of a virtual GPU's clock, since the host computed nothing."""

import time
from collections import deque
from typing import Any

import numpy as np

from harness.virtual_gpu import device_worked_us, has_clock

MOST_MARKS = 10_000


class VirtualTime:
    """Readings of two clocks at the same moments: the host's, and that of the virtual device `index`."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._marks: deque[tuple[int, int]] = deque(maxlen=MOST_MARKS)

    def mark(self) -> int | None:
        """Read both clocks, at a phase's begin or end. Returns the device's, in us; None on a real device."""
        if not has_clock():
            return None
        self._marks.append((time.time_ns() // 1000, device_worked_us(self._index)))
        return self._marks[-1][1]

    def put_into(self, trace: list[dict[str, Any]]) -> None:
        """Set each entry's `time_us` to the device's time, interpolated between two marks. If the first mark
        is later than the trace's begin, the times are not known, and each is the entry's index."""
        if not has_clock() or not trace:
            return
        given = [entry.get("time_us", 0) for entry in trace]
        moved = range(len(given))
        if self._marks and self._marks[0][0] <= given[0]:
            host, device = np.array(self._marks).T
            moved = np.interp(given, host, host[0] + device - device[0]).astype(np.int64).tolist()
        for entry, time_us in zip(trace, moved, strict=True):
            entry["time_us"] = time_us
