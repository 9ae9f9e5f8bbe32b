"""Write harness/kernel_time/measured_shapes.json: how measured products of a shape differ from estimates.

    python -m benchmarks.time.fit_shapes COMPUTE.csv

COMPUTE.csv has the form of benchmarks/time/kernel_rows.py: vidur's measurements (MIT), with the libraries of
2023 (CUDA 12.1). The estimates are those of parameters.json, whose fit knows nothing of this. A fifth of the
numbers of rows is kept aside; how far off these are stands in the file. Of an A100 and an A40 no products
with later libraries were measured, so that their factors hold for any.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.time.fit import VIDUR
from benchmarks.time.kernel_rows import KernelRow, device_of, read_rows
from benchmarks.time.kernels import is_small, seconds_of
from benchmarks.time.residuals import residuals
from harness.kernel_time.measured_shapes import SHAPES, between, shape_factor
from harness.system.files import write_whole

FEWEST, MOST, GROWTH = 16, 4096, 1.12
WITH_ONE_CUDA = {"h100": 12}
"""Devices of which products with later libraries were measured, too: the release that these are of."""


def rows_aside(m: int) -> bool:
    """Whether products of m rows are kept aside."""
    return m // 8 * 7919 % 5 == 0


def numbers_of_rows() -> list[int]:
    """Those at which a shape has a factor."""
    found = [FEWEST]
    while found[-1] < MOST:
        found.append(max(found[-1] + 1, round(found[-1] * GROWTH)))
    return found


def formula_s(row: KernelRow) -> float | None:
    """The estimate without what the shape's own measurements say; None for an unknown device."""
    hardware, seconds = device_of(row.device), seconds_of(row)
    if hardware is None or seconds is None:
        return None
    return seconds / shape_factor(hardware, row.m, row.n, row.k)


def fit_shapes(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """The content of measured_shapes.json."""
    grid = numbers_of_rows()
    ratios: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        hardware, seconds = device_of(row.device), formula_s(row) if row.is_product else None
        if hardware is None or seconds is None or row.m < FEWEST or rows_aside(row.m):
            continue
        nearest = min(grid, key=lambda m: abs(m - row.m))
        ratios[hardware.name, f"{row.n} x {row.k}"][nearest].append(row.seconds / seconds)
    devices: dict[str, Any] = {}
    for (name, shape), at in sorted(ratios.items()):
        device = devices.setdefault(name, {"cuda": WITH_ONE_CUDA.get(name), "shapes": {}})
        device["shapes"][shape] = [round(statistics.median(at[m]), 3) if m in at else None for m in grid]
    return {"source": VIDUR, "rows": grid, "devices": devices}


def aside(rows: Sequence[KernelRow], document: Mapping[str, Any]) -> dict[str, Any]:
    """By device, how far off the products are that were kept aside, of at least 128 rows."""
    kept: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        hardware, seconds = device_of(row.device), formula_s(row) if row.is_product else None
        if hardware is not None and seconds is not None and not is_small(row) and rows_aside(row.m):
            factors = document["devices"][hardware.name]["shapes"][f"{row.n} x {row.k}"]
            kept[hardware.name].append((row.seconds, seconds * between(document["rows"], factors, row.m)))
    return {name: residuals(*zip(*pairs, strict=True)) for name, pairs in sorted(kept.items())}


def written(document: Mapping[str, Any]) -> str:
    """JSON with a line for each shape."""
    text = json.dumps(document, indent=1, sort_keys=True)
    return re.sub(r"\[[^\]\[{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("compute", type=Path)
    rows = read_rows(parser.parse_args(arguments).compute)
    document = fit_shapes(rows)
    write_whole(SHAPES, written(document | {"aside": aside(rows, document)}))


if __name__ == "__main__":
    main()
