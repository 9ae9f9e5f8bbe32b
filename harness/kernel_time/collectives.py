"""How long a collective takes, by algorithm, ranks, machines and links.

    start + bytes on the wire / rate + more for each byte while the message is small

An all-gather and a reduce-scatter send (n - 1) / n of the whole, an all-reduce twice that, a broadcast the
whole (nccl-tests, doc/PERFORMANCE.md). The rate is fitted to collectives of 2 to 16 ranks on machines with
NVSwitch, with NVLink in pairs, with PCIe, and between machines. What was measured between machines was
measured on their network: for another, its rate is given, and the share of it that NCCL reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

PCIE_MEASURED = 31.5e9
"""Bytes/s in each direction of PCIe 4.0 x16, over which four GPUs with bridges in pairs were measured."""
REACHED = {"all_reduce": 0.85, "broadcast": 0.85, "send_recv": 0.85, "all_gather": 0.5, "reduce_scatter": 0.5}
"""Of the network cards' rate between machines: 340 and 200 of 400 GB/s a machine, all-reduce and all-gather
of 2 GB on 32 machines of eight H100 (github.com/NVIDIA/nccl/issues/1218)."""
START_A_NODE_US = 6.0
"""For each machine that a ring passes. A guess: a hop over InfiniBand and its flags."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "send_recv"]


def wire_share(kind: str, ranks: int) -> float:
    """What each rank sends, as a share of the whole."""
    if kind in ("send_recv", "broadcast"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def wire_s(fitted: Mapping[str, float], sent_bytes: Any) -> Any:
    """Seconds for bytes on the wire: `start_us`, `rate` (bytes/s), and `slower` (s a byte, of the first
    `small_bytes`)."""
    small = sent_bytes / (1 + sent_bytes / fitted["small_bytes"])
    return fitted["start_us"] * 1e-6 + sent_bytes / fitted["rate"] + fitted["slower"] * small


def group_of(groups: Mapping[str, Mapping[str, Any]], kind: str, together: str) -> Mapping[str, float]:
    """The parameters of a collective among ranks "8" or "16x8": those measured, or the nearest in number.
    What was not measured is as an all-reduce, whose every byte on the wire it takes."""
    like = kind if kind in groups else ("all_reduce" if "all_reduce" in groups else next(iter(groups)))
    among = groups[like]
    if together in among:
        return among[together]["fitted"]
    ranks, _, per_node = together.partition("x")
    alike = [name for name in among if ("x" in name) == bool(per_node)] or [*among]
    nearest = min(alike, key=lambda name: abs(int(name.partition("x")[0]) - int(ranks)))
    return among[nearest]["fitted"]
