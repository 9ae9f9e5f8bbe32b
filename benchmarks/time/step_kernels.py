"""Estimates beside the kernels of a real training step, which a profiler saw: step_kernels.json.

A kernel that is measured alone runs at the boost clock, on a device that does nothing else. What the
estimates add to it, the clock at the power limit, shows only in a step. Nothing is fitted to these kernels.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.hardware import Hardware, find_hardware
from harness.kernel_time import attention, memory, product

FILE = Path(__file__).with_name("step_kernels.json")


def step_kernels() -> list[dict[str, Any]]:
    """Microseconds of each, measured and estimated."""
    told = json.loads(FILE.read_bytes())
    hardware = find_hardware(told["device"])
    found = []
    for row in told["rows"]:
        estimated_us = round(1e6 * _mean_s(hardware, row), 1)
        told_us = {"measured_us": row["us"], "estimated_us": estimated_us}
        found.append({"what": row["what"], **told_us, "error": round(estimated_us / row["us"] - 1, 4)})
    return found


def _mean_s(hardware: Hardware, row: Mapping[str, Any]) -> float:
    """Seconds of one kernel: the mean, where there are several kinds."""
    if "products" in row:
        counts = [count for *_, count in row["products"]]
        each = [product(hardware, "bf16", m, n, k) for m, n, k, _ in row["products"]]
        return sum(count * s for count, s in zip(counts, each, strict=True)) / sum(counts)
    if "attention" in row:
        kernel, direction, batch, heads, length, size, causal = row["attention"]
        return attention(hardware, kernel, direction, batch, heads, length, length, size, causal=causal)
    return memory(hardware, row["kind"], row["bytes"], held_share=0.0)
