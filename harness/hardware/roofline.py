"""Work and its time: what kernels do and what links carry, and what holds them back. Imports no torch.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures" (CACM 52(4), 2009): time is at least max(FLOPs / (FLOP/s), bytes / (bytes/s)). How much more it
is, harness/kernel_time says.

With ring algorithms each rank sends and receives (n - 1) / n of the whole for an all-gather or a
reduce-scatter, twice that for an all-reduce, and the whole for a broadcast (nccl-tests, doc/PERFORMANCE.md).
Several rings run side by side, so that between machines every GPU's own network card is in use.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.hardware.hardware import Hardware
from harness.hardware.table import Cited

GPUS_PER_NODE = 8
NETWORK = Cited(50e9, "a 400 Gb/s ConnectX-7 a GPU: NVIDIA DGX H100 and H200 datasheets, networking")
"""Bytes per second that each GPU can send to other machines, in either direction: InfiniBand NDR."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


def collective_s(
    kind: Collective,
    size_bytes: int,
    ranks: Sequence[int],
    hardware: Hardware,
    network: float = NETWORK.value,
) -> float:
    """Seconds at the datasheets' rates; `size_bytes` is that of the whole (gathered, or not yet scattered).

    Ranks are on machines of GPUS_PER_NODE, in order; each GPU sends `network` bytes per second to other
    machines. Latency is left out.
    """
    count = len(ranks)
    if count < 2:
        return 0.0
    on_one_machine = Counter(rank // GPUS_PER_NODE for rank in ranks)
    link = hardware.datasheet.gpu_link.value
    if len(on_one_machine) > 1:
        among = min(on_one_machine.values())
        link = network * among if among == 1 else min(link, network * among)
    return sent_share(kind, count) * size_bytes / link


def sent_share(kind: str, count: int) -> float:
    """What each of `count` ranks sends, as a share of the whole. Times bytes, by seconds: nccl-tests' bus
    bandwidth."""
    if kind in ("send_recv", "broadcast"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (count - 1) / count


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

    def times(self, count: int) -> "Work":
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


def arithmetic_intensity(works: list[Work]) -> float:
    """FLOPs per byte of device memory moved, over all of `works`."""
    moved = sum(work.bytes_moved for work in works)
    return sum(work.flops for work in works) / moved if moved else 0.0


def machine_balance(hardware: Hardware, dtype: str) -> float:
    """FLOPs per byte at which compute and memory take equally long, from the datasheet."""
    return hardware.peak_flops(dtype) / hardware.memory_bandwidth
