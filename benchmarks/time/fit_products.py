"""Fit harness/kernel_time/products.py: the function itself, with PyTorch's tensors as its numbers.

The mean absolute error of the logarithm of time over a sample of rows, by gradient descent (Adam): the
parameters of one architecture, each kept positive, and shares below one.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.time.kernel_rows import KernelRow, aside, device_of
from benchmarks.time.residuals import residuals
from harness.hardware.hardware import Hardware
from harness.kernel_time.products import GLOBALS, TILES, Chip, product_s, tile_name

START: dict[str, float] = {
    "launch_us": 2.0,
    "tile_start_us": 1.0,
    "tile_end_us": 1.0,
    "memory_fraction": 0.85,
    "smooth": 0.3,
    "power_slowdown": 0.1,
    "power_ms": 1.0,
    "split_fraction": 0.8,
    "overlap": 2.0,
    "swizzle": 1.5,
    "alone": 0.5,
    "split_us": 0.5,
    "l2_share": 0.5,
    "choice": 30.0,
    "quiet": 1.0,
}
START_RATE = 0.7
FEWEST_ROWS, SCORED_ROWS = 32, 128
"""Products of fewer rows are not fitted; those of fewer than the second are not counted as kept aside."""
PULL = 1e-4
"""How much a parameter is held to where it began, for those that the measurements do not decide."""


class Tensors:
    """Numbers of harness/kernel_time/numbers.py that are tensors."""

    ceil, exp, log = staticmethod(torch.ceil), staticmethod(torch.exp), staticmethod(torch.log)

    @staticmethod
    def minimum(x: Any, y: Any) -> torch.Tensor:
        return torch.minimum(_tensor(x), _tensor(y))

    @staticmethod
    def maximum(x: Any, y: Any) -> torch.Tensor:
        return torch.maximum(_tensor(x), _tensor(y))


def _tensor(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def chip(hardware: Hardware) -> Chip:
    return Chip(
        hardware.sm_count, hardware.peak_flops("fp16"), hardware.memory_bandwidth, float(hardware.l2_bytes)
    )


def _fitted(x: torch.Tensor) -> dict[str, Any]:
    rates = torch.sigmoid(x[: len(TILES)])
    others = dict(zip(GLOBALS, torch.exp(x[len(TILES) :]), strict=True))
    others["memory_fraction"] = torch.clamp(others["memory_fraction"], max=1.0)  # of the datasheet's rate
    return {"tiles": dict(zip(map(tile_name, TILES), rates, strict=True))} | others


def _vector(fitted: Mapping[str, Any] | None) -> torch.Tensor:
    found = {"tiles": {}, **START, **(fitted or {})}
    rates = [min(0.999, max(0.001, found["tiles"].get(tile_name(tile), START_RATE))) for tile in TILES]
    return _tensor([math.log(r / (1 - r)) for r in rates] + [math.log(found[name]) for name in GLOBALS])


def estimate(device: Chip, rows: Sequence[KernelRow], fitted: Mapping[str, Any]) -> torch.Tensor:
    """Seconds of many products at once, measured alone as these are."""
    m, n, k = (_tensor([float(getattr(row, name)) for row in rows]) for name in "mnk")
    quiet = _tensor([float(row.is_quiet) for row in rows])
    seconds = product_s(Tensors(), device, fitted, m, n, k, 1.0, quiet=quiet)
    flops = 2 * m * n * k / device.flops_per_s
    moved = 2 * (m * n + n * k + m * k) / device.bytes_per_s
    return torch.maximum(seconds, torch.maximum(flops, moved))


def fit_products(
    by_source: Mapping[str, Sequence[KernelRow]],
    before: Mapping[str, Any],
    *,
    steps: int,
    num_rows: int,
    devices: Sequence[str] | None,
) -> dict[str, Any]:
    """By `architecture_of`: parameters, source, count, residuals of the shapes kept aside."""
    by_device: dict[str, list[KernelRow]] = defaultdict(list)
    sources: dict[str, str] = {}
    for source, rows in by_source.items():
        for row in rows:
            if row.is_product:
                by_device[row.device].append(row)
                sources[row.device] = source
    found: dict[str, Any] = dict(before)
    chips: dict[str, tuple[str, Chip]] = {}
    for name, all_rows in sorted(by_device.items()):
        hardware = device_of(name)
        if hardware is None:
            continue
        key = architecture_of(name, hardware)
        chips[name] = key, chip(hardware)
        if devices and name not in devices and key in found:
            continue
        there = found.get(key, {}).get("fitted")
        fit = [row for row in all_rows if not aside(row) and row.m >= FEWEST_ROWS]
        fitted = _fit_one(chip(hardware), fit, there, steps, num_rows, name)
        found[key] = {"fitted": fitted, "device": name, "count": len(fit)}
    for name, (key, device) in chips.items():
        scored = [row for row in by_device[name] if aside(row) and row.m >= SCORED_ROWS]
        found[key]["source"] = sources[name]
        found[key]["aside"] = _residuals(device, scored, found[key]["fitted"])
        architecture = key.partition("-")[0]
        others = [each["fitted"] for other, each in found.items() if other.partition("-")[0] != architecture]
        ratios = [
            r for fitted in others for r in _residuals(device, scored, fitted)["measured_over_estimated"]
        ]
        found[key]["elsewhere"] = [min(ratios, default=0.8), max(ratios, default=1.25)]
    return found


def architecture_of(name: str, hardware: Hardware) -> str:
    """Where the parameters of a device's kernels stand: by its compute capability, and the release of CUDA
    that its name ends in, if any."""
    release = f"-{name.rpartition('-')[2]}" if "-cuda" in name else ""
    return f"{hardware.datasheet.compute_capability}{release}"


def _residuals(device: Chip, rows: Sequence[KernelRow], fitted: Mapping[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return residuals([row.seconds for row in rows], estimate(device, rows, fitted).tolist())


def _fit_one(
    device: Chip,
    rows: Sequence[KernelRow],
    before: Mapping[str, Any] | None,
    steps: int,
    num_rows: int,
    name: str,
) -> dict[str, Any]:
    chosen = np.random.default_rng(0).permutation(len(rows))[:num_rows]
    sample = [rows[i] for i in chosen]
    begin, target = _vector(before), _tensor([math.log(row.seconds) for row in sample])
    x = begin.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([x], lr=0.08 if before is None else 0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), 0.004)
    began = time.monotonic()
    anchor = _vector(None)
    for step in range(steps):
        optimizer.zero_grad()
        off = torch.log(estimate(device, sample, _fitted(x))) - target
        loss = torch.sqrt(off * off + 0.02**2).mean() + PULL * ((x - anchor) ** 2).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            print(f"{name}: step {step + 1}, {loss.item():.4f}, {time.monotonic() - began:.0f} s", flush=True)
    fitted = _fitted(x.detach())
    tiles = {tile: round(float(rate), 4) for tile, rate in fitted["tiles"].items()}
    return {"tiles": tiles} | {each: float(f"{float(fitted[each]):.4g}") for each in GLOBALS}
