"""Hold the estimates of time against measured kernels: errors by device and kernel.

    python -m benchmarks.time.kernels FILE.csv [--json]

FILE.csv has a form of benchmarks/time/kernel_rows.py. Products of fewer than 128 rows, elementwise kernels
and collectives below 1 MB stand in rows of their own ("..., small"), for little of a training step is made of
them. --json prints a list of {device, kernel, count, median, p90, max}; errors are fractions of what was
measured. Devices that the hardware table does not have have no median, and say so.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.time.kernel_rows import KINDS, MACHINES, KernelRow, device_of, read_rows
from benchmarks.time.residuals import spread
from harness.errors import HarnessError
from harness.kernel_time import attention, collective, memory, product

MANY_ROWS, MANY_BYTES = 128, 1e6


def seconds_of(row: KernelRow) -> float | None:
    """The estimate for a row; None for a device that is not in the table."""
    hardware = device_of(row.device)
    if hardware is None:
        return None
    if row.is_collective:
        links = MACHINES.get(row.device.lower())
        return collective(hardware, row.kernel, row.size_bytes, row.ranks, row.ranks_per_node, links=links)
    if row.attention is not None:
        kernel, direction, causal, shape = row.attention
        how = {"causal": causal, "dtype": "fp16", "sustained": row.at_the_limit}
        return attention(hardware, kernel, direction, *shape, **how)  # type: ignore[arg-type]
    if row.is_product:
        return product(hardware, "fp16", row.m, row.n, row.k, sustained=False, quiet=row.is_quiet)
    return memory(hardware, KINDS.get(row.kernel, "elementwise"), row.size_bytes)


def _whole(row: KernelRow) -> str:
    if row.attention is not None:
        return "attention"
    return "products" if row.is_product else "collectives" if row.is_collective else "elementwise"


def is_small(row: KernelRow) -> bool:
    """Whether little of a step is made of such kernels."""
    if row.attention is not None:
        return False
    return row.m < MANY_ROWS if row.is_product else row.size_bytes <= MANY_BYTES


def errors(
    rows: Sequence[KernelRow], estimate: Callable[[KernelRow], float | None] = seconds_of
) -> list[dict[str, Any]]:
    """By device and kernel, large ones before small ones; then all products, kernels that wait for memory and
    collectives of each device together. `estimate`: the seconds of a row, None for an unknown device."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    unknown: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        seconds = estimate(row)
        if seconds is None:
            unknown[row.device, row.kernel] += 1
            continue
        off = abs(seconds / row.seconds - 1)
        small = ", small" if is_small(row) else ""
        groups[row.device, row.kernel + small].append(off)
        whole = _whole(row)
        groups[row.device, f"all {whole}{small}"].append(off)
    found = [
        {"device": device, "kernel": kernel} | spread(offs)
        for (device, kernel), offs in sorted(groups.items(), key=_order)
    ]
    return found + [
        {"device": device, "kernel": kernel, "count": count, "median": None, "p90": None, "max": None}
        for (device, kernel), count in sorted(unknown.items())
    ]


def of_two_layers(rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    """By device, how far apart products of the same m, n and k are that were measured in two layers: no
    estimate is there, and one by m, n and k is half as far from both at best."""
    groups: dict[str, list[float]] = defaultdict(list)
    first: dict[tuple[str, int, int, int, bool], KernelRow] = {}
    for row in rows:
        if row.is_product and not is_small(row):
            other = first.setdefault((row.device, row.m, row.n, row.k, row.is_quiet), row)
            if other.kernel != row.kernel:
                groups[row.device].append(abs(other.seconds / row.seconds - 1))
    named = "all products, of two layers"
    return [{"device": device, "kernel": named} | spread(apart) for device, apart in groups.items()]


def _order(item: tuple[tuple[str, str], list[float]]) -> tuple[str, bool, str]:
    (device, kernel), _ = item
    return device, kernel.endswith(", small"), kernel


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", dest="as_json")
    given = parser.parse_args(arguments)
    try:
        found = errors(read_rows(given.file))
    except HarnessError as error:
        sys.exit(str(error))
    if given.as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'device':24}{'kernel':30}{'count':>7}{'median':>9}{'p90':>9}{'largest':>9}")
    for each in found:
        line = f"{each['device']:24}{each['kernel']:30}{each['count']:7,}"
        if each["median"] is None:
            print(f"{line}  not in the hardware table")
        else:
            print(line + "".join(f"{each[name]:9.1%}" for name in ("median", "p90", "max")))


if __name__ == "__main__":
    main()
