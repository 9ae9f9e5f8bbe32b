"""How long a collective takes on the links between GPUs. Imports no torch.

With ring algorithms each rank sends and receives (n - 1) / n of the whole for an all-gather or a
reduce-scatter, twice that for an all-reduce, and the whole for a broadcast (nccl-tests, doc/PERFORMANCE.md).
Several rings run side by side, so that between machines every GPU's own network card is in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


def sent_share(kind: Collective, count: int) -> float:
    """What each of `count` ranks sends, as a share of the whole. Times bytes, by seconds: nccl-tests' bus
    bandwidth."""
    return {"all_reduce": 2.0, "broadcast": count / (count - 1)}.get(kind, 1.0) * (count - 1) / count
