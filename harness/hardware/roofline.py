"""The roofline: how long work takes at the least on a device, and what holds it back. Imports no torch.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures" (CACM 52(4), 2009): time = max(FLOPs / (FLOP/s), bytes / (bytes/s)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from harness.hardware.hardware import Hardware

Bound = Literal["compute", "memory", "host"]


@dataclass(frozen=True)
class Work:
    """FLOPs done and device-memory bytes moved by some kernels, and how many operators launch them."""

    flops: int = 0
    bytes_moved: int = 0
    operators: int = 1
    kind: Literal["matmul", "attention", "elementwise"] = "elementwise"
    dtype: str = "fp32"
    before_bytes: int = 0
    """Of bytes_moved, those of a kernel that is over before the FLOPs begin: a weight brought back to 16
    bit is there as a whole before it is multiplied."""

    def times(self, count: int) -> Work:
        """The same, so many times."""
        return replace(
            self,
            flops=self.flops * count,
            bytes_moved=self.bytes_moved * count,
            operators=self.operators * count,
            before_bytes=self.before_bytes * count,
        )


@dataclass(frozen=True)
class Time:
    """Seconds: the device's compute and memory floors, summed kernel by kernel, and the host's launches."""

    device_s: float
    compute_s: float
    memory_s: float
    host_s: float
    computing_s: float = 0.0
    """Of device_s, that of kernels whose compute floor is the larger; the rest wait for memory."""

    @property
    def seconds(self) -> float:
        """The device works while the host launches ahead: the slower of the two."""
        return max(self.device_s, self.host_s)

    @property
    def bound(self) -> Bound:
        """What would have to be faster for the work to end sooner."""
        if self.host_s > self.device_s:
            return "host"
        return "compute" if self.computing_s > self.device_s / 2 else "memory"


def time_of(works: list[Work], hardware: Hardware) -> Time:
    """Time of `works`, one after the other, at the achievable rates of `hardware`.

    Never less than total FLOPs over peak nor total bytes over bandwidth: each kernel takes the larger
    of its two floors, and achievable fractions are at most 1. Raises InputError for a dtype that the
    device does not compute in.
    """
    device = compute = memory = host = computing = 0.0
    for work in works:
        compute_s = work.flops / achievable_flops(work, hardware) if work.flops else 0.0
        bandwidth = hardware.memory_bandwidth * hardware.calibration.memory_fraction
        memory_s, before_s = work.bytes_moved / bandwidth, work.before_bytes / bandwidth
        device += before_s + max(compute_s, memory_s - before_s)
        compute += compute_s
        memory += memory_s
        computing += compute_s if compute_s > memory_s - before_s else 0.0
        host += work.operators * hardware.calibration.host_op_s
    return Time(device, compute, memory, host, computing)


def achievable_flops(work: Work, hardware: Hardware) -> float:
    """FLOP/s that `work` can reach: dense peak of its dtype times the calibrated fraction of its kind
    (of products in fp32, their own)."""
    calibration = hardware.calibration
    fraction = calibration.attention_fraction if work.kind == "attention" else calibration.matmul_fraction
    if work.dtype == "fp32" and work.kind != "attention":
        fraction = calibration.fp32_matmul_fraction or fraction
    return hardware.peak_flops(work.dtype) * fraction


def transfer_s(bytes_moved: int, hardware: Hardware) -> float:
    """Seconds to move bytes over the host link, in one direction, from or to pinned memory."""
    return bytes_moved / (hardware.datasheet.host_link.value * hardware.calibration.host_link_fraction)


def arithmetic_intensity(works: list[Work]) -> float:
    """FLOPs per byte of device memory moved, over all of `works`."""
    moved = sum(work.bytes_moved for work in works)
    return sum(work.flops for work in works) / moved if moved else 0.0


def machine_balance(hardware: Hardware, dtype: str) -> float:
    """FLOPs per byte at which compute and memory take equally long, from the datasheet."""
    return hardware.peak_flops(dtype) / hardware.memory_bandwidth
