"""The roofline: what kernels compute and move, what links between GPUs carry, and how long that takes at
least. Imports no torch.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures" (CACM 52(4), 2009): time is at least max(FLOPs / (FLOP/s), bytes / (bytes/s)).
harness/kernel_time estimates how much longer it is.

With ring algorithms each rank sends and receives (n - 1) / n of the whole for an all-gather or a
reduce-scatter, twice that for an all-reduce, and the whole for a broadcast (nccl-tests, doc/PERFORMANCE.md).
Several rings run side by side, so that between machines every GPU's own network card is in use.
"""

from dataclasses import dataclass, replace
from typing import Literal

from harness.hardware.hardware import Hardware
from harness.hardware.table import Cited

GPUS_PER_NODE = 8
"""GPUs of one machine, in which ranks are placed in order."""
NETWORK = Cited(50e9, "a 400 Gb/s ConnectX-7 a GPU: NVIDIA DGX H100 and H200 datasheets, networking")
"""Bytes per second that each GPU can send to other machines, and that it can receive: InfiniBand NDR."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


def sent_share(kind: str, count: int) -> float:
    """The share of the whole tensor's bytes that each of `count` ranks sends. These bytes over the seconds
    are what nccl-tests calls bus bandwidth."""
    if kind in ("send_recv", "broadcast"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (count - 1) / count


Bound = Literal["compute", "memory", "host"]
"""What a time depends on: the device's FLOP/s, its memory bandwidth, or the host's launches."""


@dataclass(frozen=True)
class Work:
    """What some kernels do: FLOPs, and bytes that they read from and write to device memory."""

    flops: int = 0
    bytes_moved: int = 0
    operators: int = 1
    """How many operators launch the kernels."""
    kind: Literal["matmul", "attention", "elementwise"] = "elementwise"
    dtype: str = "fp32"
    before_bytes: int = 0
    """The part of bytes_moved that a kernel moves which ends before the FLOPs begin: a quantized weight is
    brought back to 16 bit as a whole before it is multiplied."""
    shape: tuple[int, int, int, int] | None = None
    """For one product: m, n, k and batch. Without it, a product is assumed to be a cube."""
    walk: str = "elementwise"
    """Of kernels without FLOPs, how they walk through their tensors, as harness/kernel_time names it."""
    elements: int = 0
    """Of kernels that walk through lists of tensors: how many elements they step through in all."""

    def share(self, part: float) -> "Work":
        """`part` of this work, by as many operators."""
        flops, moved, before = (
            round(each * part) for each in (self.flops, self.bytes_moved, self.before_bytes)
        )
        return replace(self, flops=flops, bytes_moved=moved, before_bytes=before)

    def times(self, count: int) -> "Work":
        """`count` times this work."""
        return replace(
            self,
            flops=self.flops * count,
            bytes_moved=self.bytes_moved * count,
            operators=self.operators * count,
            before_bytes=self.before_bytes * count,
            elements=self.elements * count,
        )


@dataclass(frozen=True)
class Time:
    """How long some work takes, in seconds."""

    device_s: float
    """The device's time, summed kernel by kernel."""
    compute_s: float
    """The time of the FLOPs alone."""
    memory_s: float
    """The time of the bytes alone."""
    host_s: float
    """The time that the host takes, by the number of operators."""
    computing_s: float
    """The part of device_s in kernels that compute longer than they move bytes; others wait for memory."""
    range_s: tuple[float, float]
    """The range of device_s, by the 10th and the 90th percentile of the errors of such estimates."""

    @property
    def seconds(self) -> float:
        """The time of the slower of device and host: the device works while the host launches ahead of it."""
        return max(self.device_s, self.host_s)

    @property
    def bound(self) -> Bound:
        """What would have to be faster for the work to take less time."""
        if self.host_s > self.device_s:
            return "host"
        return "compute" if self.computing_s > self.device_s / 2 else "memory"


def arithmetic_intensity(works: list[Work]) -> float:
    """FLOPs per byte of device memory moved, over all of `works`."""
    moved = sum(work.bytes_moved for work in works)
    return sum(work.flops for work in works) / moved if moved else 0.0


def machine_balance(hardware: Hardware, dtype: str) -> float:
    """FLOPs per byte of work that takes as long to compute as to move, by the datasheet's rates."""
    return hardware.peak_flops(dtype) / hardware.memory_bandwidth
