"""Files of measured kernels, as rows that the room for time can estimate.

Three forms: `device,kernel,m,n,k,bytes,median_ms` (products of m tokens, n outputs, k inputs in fp16, and
kernels that wait for memory, with their bytes), and
`machine,collective,ranks,devices_per_node,bytes,median_ms`; and
fused attention, `device,kernel,direction,batch,heads,seq_len,head_dim,causal,tflops,source`, of which half of
the square counts under a causal mask.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.hardware.hardware import Hardware, find_hardware, hardware_names, with_cuda
from harness.kernel_time import attention_flops
from harness.kernel_time.fused_attention import Direction

DEVICES = {"a100": "a100-80gb", "h100": "h100", "a40": "a40", "a10": "a10g", "v100": "v100-32gb"}
"""Names of devices that the files shorten."""
AT_THE_LIMIT = "(at the power limit)"
"""In the source of a row that was measured under a load that lowers the clock, and says so."""
KINDS = {
    "add": "elementwise",
    "mlp_act": "gated_vllm",
    "input_layernorm": "norm_vllm",
    "post_attention_layernorm": "norm_vllm",
}
"""Of kernels without n and k; others are elementwise."""
MACHINES = {
    "a100_dgx": "nvswitch_8.0",
    "h100_dgx": "nvswitch_9.0",
    "a100_pairwise_nvlink": "bridge_8.0",
    "h100_pairwise_nvlink": "bridge_9.0",
    "a40_pairwise_nvlink": "pcie",
}
"""Links of the machines that were measured, as the parameters call them."""


@dataclass(frozen=True)
class KernelRow:
    """One measured kernel. Of a product m, n and k; of others their bytes; of a collective its ranks."""

    device: str
    kernel: str
    seconds: float
    m: int = 0
    n: int = 0
    k: int = 0
    size_bytes: float = 0.0
    ranks: int = 0
    ranks_per_node: int = 0
    attention: tuple[str, Direction, bool, tuple[int, int, int, int, int]] | None = None
    """Kernel, direction, causal or not; batch, heads, query and key length, head size."""
    at_the_limit: bool = False
    """Whether the source says that the load had lowered the clock."""

    @property
    def is_product(self) -> bool:
        return self.n > 0

    @property
    def is_quiet(self) -> bool:
        """Whether one factor is nearly all zeros. The profiles have weights of 1e-3 and less, so that what
        the
        second product of an MLP is given, a product of two such numbers, vanishes in fp16."""
        return self.kernel.startswith("mlp_down")

    @property
    def is_collective(self) -> bool:
        return self.ranks > 0


def read_rows(file: Path) -> list[KernelRow]:
    """The rows of a file of either form. Raises InputError for another form; rows without a time, or whose
    numbers are none, are left out."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            fields = {*(reader.fieldnames or ())}
            if {"machine", "collective", "ranks", "bytes", "median_ms"} <= fields:
                return [*filter(None, map(_collective, reader))]
            if {"device", "kernel", "direction", "seq_len", "head_dim", "tflops"} <= fields:
                return [*filter(None, map(_attention, reader))]
            if {"device", "kernel", "median_ms"} <= fields:
                return [*filter(None, map(_kernel, reader))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: {error}. Name a CSV file of measured kernels.") from None
    raise InputError(
        f"{file}: its columns are {', '.join(sorted(fields))}. It should have device, kernel, m, n, k, "
        "bytes, median_ms; or machine, collective, ranks, devices_per_node, bytes, median_ms."
    )


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def _kernel(row: dict[str, str]) -> KernelRow | None:
    seconds = _number(row["median_ms"]) / 1e3
    m, n, k = (int(_number(row.get(name))) for name in "mnk")
    size = _number(row.get("bytes"))
    if seconds <= 0 or not ((n and k and m) or size):
        return None
    return KernelRow(row["device"], row["kernel"], seconds, m, n, k, size)


def _collective(row: dict[str, str]) -> KernelRow | None:
    seconds, ranks = _number(row["median_ms"]) / 1e3, int(_number(row["ranks"]))
    if seconds <= 0 or ranks < 2:
        return None
    per_node = int(_number(row.get("devices_per_node"))) or ranks
    return KernelRow(
        row["machine"],
        row["collective"],
        seconds,
        size_bytes=_number(row["bytes"]),
        ranks=ranks,
        ranks_per_node=per_node,
    )


def _attention(row: dict[str, str]) -> KernelRow | None:
    length, size = int(_number(row["seq_len"])), int(_number(row["head_dim"]))
    batch, heads = (int(_number(row.get(name))) or 1 for name in ("batch", "heads"))
    causal = row.get("causal", "0").lower() in ("1", "true")
    direction: Direction = "backward" if row["direction"].startswith("b") else "forward"
    shape = batch, heads, length, length, size
    flops = attention_flops(*shape, causal=causal, direction=direction)
    reached = _number(row["tflops"]) * 1e12
    if flops <= 0 or reached <= 0:
        return None
    about = row["kernel"], direction, causal, shape
    return KernelRow(
        row["device"],
        f"{row['kernel']} {direction}",
        flops / reached,
        attention=about,
        at_the_limit=AT_THE_LIMIT in row.get("source", ""),
    )


def device_of(name: str) -> Hardware | None:
    """The device of the table that a file calls so, with the libraries that were measured: those of CUDA 12
    unless the name ends in another release ("h100-cuda13"). None if the table has none. As a machine's name
    begins (a100_dgx), so does its device's."""
    short, _, cuda = name.lower().replace("_", "-").replace("nvidia-", "").partition("-cuda")
    known = (short, DEVICES.get(short, ""), DEVICES.get(short.split("-")[0], ""))
    begins = [each for each in hardware_names() if each.startswith(short) or short.startswith(each)]
    found = [each for each in known if each in hardware_names()] or begins
    return with_cuda(find_hardware(found[0]), int(cuda or 12)) if found else None


def aside(row: KernelRow) -> bool:
    """Whether a row is kept aside from the fit: a fifth of all shapes of products with all their m, of all
    sizes of other kernels."""
    if row.is_product:
        return (row.n * 31 + row.k * 17) // 64 % 5 == 0
    return int(row.size_bytes) // 2048 * 7919 % 5 == 0
