"""Take measured kernels of devices that vidur has not: write benchmarks/time/aiconfigurator.csv, and
unfitted.csv for a device whose estimates follow from its datasheet and from the kernels of another.

    python -m benchmarks.time.aiconfigurator FOLDER

FOLDER is aic-core/src/aiconfigurator_core/systems/data of ai-dynamo/aiconfigurator (Apache-2.0): parquet
files of kernels that three inference servers ran on the devices themselves, each in bursts of a CUDA graph.
Taken are products in bf16, which PyTorch's linear layer computes there, and the cast of a 16-bit matrix to
fp8 by a given scale, an elementwise kernel of 3 bytes an element. A row is the median of what the newest
release of each server measured.

Of the products only those are taken that compute for twice as long as their matrices take from the device's
memory: a repeated product finds its weights in the L2 cache, where those of a training step are not.
"""

import csv
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from benchmarks.time.kernel_rows import device_of
from harness.kernel_time.estimates import bound_s

FILE = Path(__file__).with_name("aiconfigurator.csv")
UNFITTED = Path(__file__).with_name("unfitted.csv")
"""To what is here nothing is fitted."""
DEVICES = {
    "l40s": "l40s",
    "h100_sxm": "h100-cuda13",
    "h200_sxm": "h200-cuda13",
    "b200_sxm": "b200",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
"""Folders, and the names that their devices have here. All servers run on CUDA 13; it is said where vidur has
measured the same chip with an earlier one."""
UNFITTED_DEVICES = {"gb200": "gb200"}
RELEASES = {"sglang": "0.5.14", "trtllm": "1.3.0rc20", "vllm": "0.24.0"}
FEWEST_ROWS = 128
"""Products with fewer are left out."""
PRODUCTS, CASTS = 2_000, 300
"""How many different kernels of a device are taken, chosen at random."""
Rows = dict[tuple[int, ...], list[float]]


def read(folder: Path, file: str, servers: Iterable[str] = RELEASES) -> Iterator[dict[str, Any]]:
    """The rows of one table, of each of the servers that has it."""
    for server in servers:
        path = folder / server / RELEASES[server] / file
        if path.exists():
            yield from parquet.read_table(path).to_pylist()


def products(folder: Path, device: str) -> Rows:
    """Milliseconds by rows, outputs and inputs."""
    found: Rows = defaultdict(list)
    hardware = device_of(device)
    assert hardware is not None, device
    for row in read(folder / "gemm", "gemm_perf.parquet"):
        m, n, k = row["m"], row["n"], row["k"]
        flops, moved = 2 * m * n * k, 2 * (m * n + n * k + m * k)
        computes = bound_s(hardware, flops, 0, "bf16") > 2 * bound_s(hardware, 0, moved, "bf16")
        if row["gemm_dtype"] == "bfloat16" and m >= FEWEST_ROWS and computes:
            found[m, n, k].append(row["latency"])
    return found


def casts(folder: Path) -> Rows:
    """Milliseconds by bytes. sglang's cast is left out: it reads its matrix twice."""
    found: Rows = defaultdict(list)
    for row in read(folder / "quantize", "scale_matrix_perf.parquet", ("trtllm", "vllm")):
        if row["quant_dtype"] == "fp8" and row["latency"] > 0:
            found[(3 * row["m"] * row["k"],)].append(row["latency"])
    return found


def main(folder: Path, out: Path, devices: dict[str, str]) -> None:
    """Write the file `out` of `devices`."""
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["device", "kernel", "m", "n", "k", "bytes", "median_ms"])
        for name, device in devices.items():
            for kernel, rows, most in (
                ("linear", products(folder / name, device), PRODUCTS),
                ("fp8_cast", casts(folder / name), CASTS),
            ):
                for key in sorted(random.Random(0).sample(sorted(rows), min(most, len(rows)))):
                    of_which = (*key, "") if kernel == "linear" else ("", "", "", *key)
                    writer.writerow([device, kernel, *of_which, f"{statistics.median(rows[key]):.5g}"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), FILE, DEVICES)
    main(Path(sys.argv[1]), UNFITTED, UNFITTED_DEVICES)
