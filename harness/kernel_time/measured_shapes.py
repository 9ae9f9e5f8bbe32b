"""Products whose columns and inner size were measured on the very device: what their measurements say.

A library chooses tiles for a shape by rules that no formula here has, and where it chooses badly it does so
at all neighbouring numbers of rows. measured_shapes.json, which benchmarks/time/fit_shapes.py writes, has for
each shape that was measured, at some numbers of rows, measured over estimated seconds.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from harness.hardware import Hardware

SHAPES = Path(__file__).with_name("measured_shapes.json")


@cache
def measured_shapes() -> Mapping[str, Any]:
    """The content of measured_shapes.json."""
    return json.loads(SHAPES.read_text(encoding="utf-8"))


def shape_factor(hardware: Hardware, m: int, n: int, k: int) -> float:
    """The seconds of products of n columns and inner size k over those estimated for them, at m rows; 1 for a
    shape that nobody measured on this device with its libraries."""
    found = measured_shapes()
    device = found["devices"].get(hardware.name)
    if device is None or device["cuda"] not in (None, hardware.calibration.cuda):
        return 1.0
    factors = device["shapes"].get(f"{n} x {k}")
    return 1.0 if factors is None else between(found["rows"], factors, m)


def between(rows: Sequence[int], factors: Sequence[float | None], m: int) -> float:
    """The factor at m rows, from those at the numbers in `rows`, where one is known; at least one is."""
    known = [(at, factor) for at, factor in zip(rows, factors, strict=True) if factor is not None]
    after = bisect_right(known, m, key=lambda each: each[0])
    if after in (0, len(known)):
        return known[max(0, after - 1)][1]
    (left, low), (right, high) = known[after - 1], known[after]
    return low + (high - low) * (m - left) / (right - left)
