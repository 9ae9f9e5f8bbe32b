"""The links' rates against bus bandwidths that others measured: how far off the time of a collective is.

    python -m benchmarks.published.links        compute, write profiles/published/links.json

Measured were nccl-tests, or a program that counts like it: bus bandwidth is what each rank must send with a
ring, over the seconds (NVIDIA/nccl-tests, doc/PERFORMANCE.md). The model was fitted to other machines than
these. Where it is off, `reason` says why.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from harness.hardware.hardware import find_hardware
from harness.hardware.roofline import GPUS_PER_NODE, NETWORK, Collective, sent_share
from harness.kernel_time import collective
from harness.system.files import write_whole

RESULTS = Path(__file__).parents[2] / "profiles" / "published" / "links.json"
MIB, GIB = 2**20, 2**30
SWITCH = "the NVSwitch adds the parts (NVLS), so less crosses the links than a ring sends"
SMALL = "NCCL's steps take longer in small messages than on the machines of the fit"
RING = "a ring reaches four fifths of the line rate: protocol (NCCL's author, NVIDIA/nccl-tests#212)"
TREE = "more than the network lets a ring send: a tree sends each byte once between two machines"
CARDS = "the network cards reach more of their rate than those of the fit"
BRIDGE = "a pair on NVLink bridges: nobody there says why it is so slow"
PAIR = "reaches more of its links than the pair of the fit"


class Measured(NamedTuple):
    """One measured collective."""

    source: str
    gpu: str
    """Of the hardware table."""
    ranks: int
    kind: Collective
    size_bytes: int | None
    """None where the source gives a rate of large messages only."""
    bus_gb_per_s: float
    reason: str
    network: float = NETWORK.value
    """Bytes per second that each GPU can send to other machines there."""


def _h200(size_bytes: int, bus: float, reason: str) -> Measured:
    source = "stas00/ml-engineering@c53741b:network/benchmarks/results/all-reduce-8xH200.md"
    return Measured(source, "h200", 8, "all_reduce", size_bytes, bus, reason)


def _a3_mega(size_bytes: int, bus: float, reason: str) -> Measured:
    source = "lessizzmore/create-a3mega-ztan-fork@02dd8f4:ztan-NCCL-test-result"
    return Measured(source, "h100", 16, "all_reduce", size_bytes, bus, reason, network=25e9)


def _oci_a100(size_bytes: int, bus: float) -> Measured:
    source = "oracle-quickstart/oci-hpc-oke@3e5d61b:docs/running-rdma-workloads-on-oke-a100.md"
    return Measured(source, "a100-40gb", 16, "all_reduce", size_bytes, bus, CARDS, network=25e9)


def _h100_pair(size_bytes: int, bus: float) -> Measured:
    return Measured("NVIDIA/nccl-tests#194", "h100-pcie", 2, "all_reduce", size_bytes, bus, BRIDGE)


MEASURED = (
    _h200(MIB, 39.93, SMALL),
    _h200(4 * MIB, 107.16, SMALL),
    _h200(16 * MIB, 219.89, SMALL),
    _h200(64 * MIB, 346.51, ""),
    _h200(256 * MIB, 436.15, SWITCH),
    _h200(GIB, 463.58, SWITCH),
    _h200(16 * GIB, 482.26, SWITCH),
    _h200(16 * GIB, 367.61, f"without NVLS: {RING}"),
    Measured("NVIDIA/nccl#1281", "h100", 8, "reduce_scatter", None, 360.0, RING),
    Measured("NVIDIA/nccl#1281", "h100", 8, "all_gather", None, 350.0, RING),
    Measured("NVIDIA/nccl-tests#178", "a100-40gb", 2, "all_reduce", None, 208.0, PAIR),
    _h100_pair(GIB, 115.37),
    _h100_pair(4 * GIB, 116.26),
    _a3_mega(16 * MIB, 32.18, SMALL),
    _a3_mega(128 * MIB, 152.32, SMALL),
    _a3_mega(GIB, 297.86, TREE),
    _a3_mega(8 * GIB, 338.82, TREE),
    _oci_a100(GIB, 170.99),
    _oci_a100(10 * GIB, 180.06),
)
"""The out-of-place column. #1281 gives no number of GPUs beside H100: a whole machine is taken."""


def row(measured: Measured) -> dict[str, Any]:
    """What was measured, and the model's bus bandwidth and how far its seconds are from the measured ones."""
    size_bytes = measured.size_bytes or GIB
    hardware, together = find_hardware(measured.gpu), min(measured.ranks, GPUS_PER_NODE)
    seconds = collective(
        hardware, measured.kind, size_bytes, measured.ranks, together, network=measured.network
    )
    sent = sent_share(measured.kind, measured.ranks) * size_bytes
    found = measured._asdict() | {"model_bus_gb_per_s": sent / seconds / 1e9}
    return found | {"seconds_off": measured.bus_gb_per_s * 1e9 * seconds / sent - 1}


def main() -> None:
    rows = [row(measured) for measured in MEASURED]
    write_whole(RESULTS, (json.dumps({"rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
