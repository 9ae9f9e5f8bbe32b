"""Work and its time: what kernels do, and what holds them back. Imports no torch.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures" (CACM 52(4), 2009): time is at least max(FLOPs / (FLOP/s), bytes / (bytes/s)). How much more it
is, harness/kernel_time says.
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
    shape: tuple[int, int, int, int] | None = None
    """Of one product m, n, k and batch; of one attention query and key length, head size, and batch times
    heads. Without it a product is taken for a cube, and attention for causal and long."""

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
    range_s: tuple[float, float] | None = None
    """device_s from and to: the 10th and the 90th percentile of how far off such estimates are."""

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
