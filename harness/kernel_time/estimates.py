"""How many seconds one operation takes on one device. None is faster than the roofline allows.

Each function takes what decides the time of its operation. `sustained` says that the device has been at work
for long, as in a training step: a kernel that is measured alone, between pauses, may run at a higher clock.
The range of an estimate is `range_of` its kind.

A collective takes start + bytes on the wire / rate + more for each byte while the message is small. An
all-gather and a reduce-scatter send (n - 1) / n of the whole, an all-reduce twice that, a broadcast the whole
(nccl-tests, doc/PERFORMANCE.md). The rate is fitted to collectives of 2 to 16 ranks on machines with
NVSwitch, with NVLink in pairs, with PCIe, and between machines. Between machines the fit holds for the
network that was measured; of another network the rate is given, and REACHED says what share of it NCCL uses.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from harness.hardware import Calibration, Hardware, sent_share
from harness.kernel_time.fused_attention import Direction, attention_flops, attention_s
from harness.kernel_time.measured_shapes import shape_factor
from harness.kernel_time.memory_kernels import Memory, memory_s
from harness.kernel_time.numbers import SCALARS
from harness.kernel_time.parameters import (
    Spread,
    attention_architecture,
    device_rate,
    document,
    fitted_attention,
    fp32_rate,
    measured_as,
    memory_of,
    power_slowdown,
    products_of,
    spread,
)
from harness.kernel_time.products import Chip, product_s

PCIE_MEASURED = 31.5e9
"""Bytes/s in each direction of PCIe 4.0 x16, over which four GPUs with bridges in pairs were measured."""
REACHED = {"all_reduce": 0.85, "broadcast": 0.85, "send_recv": 0.85, "all_gather": 0.5, "reduce_scatter": 0.5}
"""The share of the network cards' rate that a collective between machines reaches: 340 and 200 of 400 GB/s a
machine in all-reduce and all-gather of 2 GB on 32 machines of eight H100
(github.com/NVIDIA/nccl/issues/1218)."""
START_A_NODE_US = 6.0
"""Microseconds for each machine that a ring passes. A guess: a hop over InfiniBand and its flags."""

THIN = 32
"""The inner size up to which a product in fp32, as of a LoRA adapter, takes as long as its result takes."""
LONG = 4096
"""Where two of a product's sizes are at most THIN and the third is larger than this, there are no tiles to
speak of: cuBLAS has kernels for vectors, and divides a long inner size among all multiprocessors. Like a sum,
it waits for memory."""
ELEMENT_BYTES = {
    "fp32": (4.0, 4.0),
    "tf32": (4.0, 4.0),
    "bf16": (2.0, 2.0),
    "fp16": (2.0, 2.0),
    "fp8": (1.0, 2.0),
}
"""Bytes of an element of a product's factors and of its result, by the factors' dtype."""


def wire_s(fitted: Mapping[str, float], sent_bytes: Any) -> Any:
    """Seconds for bytes on the wire. `fitted`: `start_us`, `rate` (bytes/s), and `slower` (additional seconds
    for each of the first `small_bytes`)."""
    small = sent_bytes / (1 + sent_bytes / fitted["small_bytes"])
    return fitted["start_us"] * 1e-6 + sent_bytes / fitted["rate"] + fitted["slower"] * small


def group_of(groups: Mapping[str, Mapping[str, Any]], kind: str, together: str) -> Mapping[str, float]:
    """The parameters of a collective among ranks, "8" or "16x8" (16 on machines of 8): the measured ones, or
    those of the nearest number of ranks. A kind that was not measured takes an all-reduce's, byte for byte on
    the wire."""
    like = kind if kind in groups else ("all_reduce" if "all_reduce" in groups else next(iter(groups)))
    among = groups[like]
    if together in among:
        return among[together]["fitted"]
    ranks, _, per_node = together.partition("x")
    comparable = [name for name in among if ("x" in name) == bool(per_node)] or [*among]
    nearest = min(comparable, key=lambda name: abs(int(name.partition("x")[0]) - int(ranks)))
    return among[nearest]["fitted"]


KernelKind = Literal["product", "attention", "memory", "collective", "copy"]
"""Kinds of operations. Estimates of one kind err alike, so that errors within a kind do not cancel."""


def bound_s(hardware: Hardware, flops: float, bytes_moved: float, dtype: str) -> float:
    """Seconds by the roofline: no kernel is faster than the datasheet's FLOP/s and bytes/s."""
    compute = flops / hardware.peak_flops(dtype) if flops else 0.0
    return max(compute, bytes_moved / hardware.memory_bandwidth)


def chip_of(hardware: Hardware, dtype: str) -> Chip:
    """The figures of the device that decide how long a product in `dtype` takes."""
    return Chip(
        hardware.sm_count, hardware.peak_flops(dtype), hardware.memory_bandwidth, float(hardware.l2_bytes)
    )


def memory_figures(hardware: Hardware) -> Memory:
    """The figures of the device that decide how long a kernel takes that memory limits."""
    return Memory(hardware.memory_bandwidth, float(hardware.l2_bytes), hardware.peak_flops("fp32"))


def product(
    hardware: Hardware,
    dtype: str,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    sustained: bool = True,
    quiet: bool = False,
) -> float:
    """Seconds of `batch` products of m x k and k x n in `dtype` (bf16, fp16, fp32; tf32, of numbers in fp32;
    fp8, whose result is in 16 bit), accumulated in fp32. `quiet`: one factor is nearly all zeros.

    Raises InputError for a dtype that the device does not compute in.
    """
    if min(m, n, k, batch) < 1:
        return 0.0
    return _product(Key(hardware), dtype, m, n, k, batch, sustained, quiet)


ALIGNED_BYTES = 16
"""What each row of a 16-bit matrix begins on, for tensor cores: with a vocabulary of 50,257 it does not."""


def unaligned_product(hardware: Hardware, flops: float) -> float:
    """The least seconds of a 16-bit product whose matrices have rows that do not begin on 16 bytes: older
    kernels multiply them, and each multiprocessor is as fast as it was on an H100."""
    return flops / (document()["unaligned"]["flops_per_s"] * hardware.sm_count)


def attention(
    hardware: Hardware,
    kernel: str,
    direction: Direction,
    batch: float,
    heads: int,
    query: int,
    keys: int,
    head_dim: int,
    *,
    causal: bool,
    dtype: str = "bf16",
    bytes_moved: float = 0.0,
    sustained: bool = True,
) -> float:
    """Seconds of one call of a fused `kernel`: flash2, flash3, cudnn or efficient. `query` and `keys` are
    lengths in tokens, of which `batch` need not be whole; `bytes_moved` bounds the time from below."""
    if min(heads, query, keys, head_dim) < 1:
        return 0.0
    flops = attention_flops(batch, heads, query, keys, head_dim, causal=causal, direction=direction)
    calibration = hardware.calibration
    if calibration.attention_fraction is not None:
        whole = attention_flops(batch, heads, query, keys, head_dim, causal=False, direction=direction)
        rate = hardware.peak_flops(dtype) * calibration.attention_fraction
        return max(whole / rate, bytes_moved / _flat_bandwidth(hardware))
    fitted = fitted_attention(attention_architecture(hardware), kernel, direction)
    slowdown = power_slowdown(hardware) if sustained else 0.0
    peak = hardware.peak_flops(dtype)
    seconds = attention_s(fitted, peak, flops, keys, head_dim, causal=causal, slowdown=slowdown)
    seconds *= calibration.attention_scale
    launch_s = memory_of(hardware, "elementwise")["launch_us"] * 1e-6
    return max(seconds + launch_s, bound_s(hardware, flops, bytes_moved, dtype))


def memory(
    hardware: Hardware,
    kind: str,
    bytes_moved: float,
    launches: int = 1,
    held_share: float | None = None,
    elements: float = 0.0,
) -> float:
    """Seconds of `launches` kernels that memory limits, which move `bytes_moved` in all. `kind`: see LIKE
    (kernel_time/memory_kernels.py). `held_share`: of the bytes, in [0, 1], which the L2 cache holds; None: as
    in a benchmark that repeats the kernel. `elements`: of a kind whose walk counts them (foreach)."""
    calibration = hardware.calibration
    if calibration.memory_fraction is not None:
        return bytes_moved / _flat_bandwidth(hardware)
    fitted, device, scale = memory_of(hardware, kind), memory_figures(hardware), calibration.memory_scale
    seconds = memory_s(SCALARS, device, fitted, bytes_moved, launches, held_share, scale)
    if (blocks := document()["blocks"].get(kind)) is None:
        return seconds
    # blocks that write little each, or elements one by one: how many multiprocessors work them off counts too
    if "elements_per_s" in blocks:
        blocks_s = elements / (blocks["elements_per_s"] * hardware.sm_count)
    else:
        blocks_s = bytes_moved / (blocks["bytes_per_s"] * hardware.sm_count)
    power = blocks.get("power")
    return max(seconds, blocks_s) if power is None else (seconds**power + blocks_s**power) ** (1 / power)


class CacheRoom(NamedTuple):
    """What decides how long the L2 cache of a device holds what was touched."""

    size_bytes: float
    """The bytes that may be touched meanwhile before anything is evicted."""
    evicted: float
    """By how much more is evicted than is touched beyond them."""


def cache_room(hardware: Hardware) -> CacheRoom:
    """The room in the L2 cache of a device, as elementwise kernels show it."""
    fitted = memory_of(hardware, "elementwise")
    return CacheRoom(fitted["l2_share"] * hardware.l2_bytes, fitted["l2_evicted"])


def collective(
    hardware: Hardware,
    kind: str,
    size_bytes: float,
    ranks: int,
    ranks_per_node: int,
    *,
    network: float | None = None,
    links: str | None = None,
) -> float:
    """Seconds of one collective of `size_bytes` (of the whole, gathered or not yet scattered) among `ranks`,
    of which `ranks_per_node` share a machine.

    `network`: bytes/s that each GPU sends to other machines; None: as on the machines that were measured.
    `links`: the kind of links within a machine, where it is not the one that the device has in the table.
    """
    if ranks < 2 or size_bytes <= 0:
        return 0.0
    groups = document()["links"]
    sent = sent_share(kind, ranks) * size_bytes
    name, together, scale = (links, str(ranks), 1.0) if links else _links(hardware, ranks_per_node)
    if ranks <= ranks_per_node:
        fitted = group_of(groups[name], kind, together)
        return wire_s({**fitted, "rate": fitted["rate"] * scale, "slower": fitted["slower"] / scale}, sent)
    if network is None:
        measured = groups[name] if _crosses(groups[name], kind) else groups[MEASURED_BETWEEN]
        return wire_s(group_of(measured, kind, f"{ranks}x{ranks_per_node}"), sent)
    inside = group_of(groups[name], kind, together if ranks_per_node > 1 else "2")
    rate = min(inside["rate"] * scale, network * ranks_per_node * REACHED.get(kind, REACHED["all_reduce"]))
    start = inside["start_us"] + START_A_NODE_US * -(-ranks // ranks_per_node)
    return max(wire_s({**inside, "rate": rate, "start_us": start}, sent), sent / (network * ranks_per_node))


MEASURED_BETWEEN, BRIDGE = "nvswitch_8.0", "bridge_8.0"
"""The links of the machines between which collectives were measured, and of GPUs with bridges in pairs."""
NO_PEERS = ("rtx-30", "rtx-40", "rtx-50")
"""Beginnings of the names of cards whose driver allows no card to read another's memory over PCIe. Where
there is a bridge for two of them it is sold apart, and none is assumed."""


def _crosses(groups: Mapping[str, Any], kind: str) -> bool:
    """Whether `groups` has measurements of a collective between machines."""
    return any("x" in name for name in groups.get(kind, groups.get("all_reduce", {})))


def transfer(hardware: Hardware, size_bytes: float) -> float:
    """Seconds of a copy between pinned host memory and the device, in one direction."""
    calibration = hardware.calibration
    return size_bytes / (hardware.datasheet.host_link.value * calibration.host_link_fraction)


def range_of(hardware: Hardware, kind: KernelKind) -> Spread:
    """The range as factors on seconds: the 10th and 90th percentile of measured over estimated."""
    part = {"product": "products", "memory": "memory"}.get(kind)
    name = measured_as(part, hardware) if part else hardware.datasheet.compute_capability
    return spread(hardware.name, name, kind)


class Key:
    """A device as a key of a cache, by what decides about products: a Hardware holds dictionaries, which
    cannot be hashed."""

    __slots__ = ("_key", "hardware")

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        calibration = hardware.calibration
        self._key = (
            hardware.datasheet.name,
            hardware.datasheet.memory_bandwidth.value,
            tuple(sorted((name, cited.value) for name, cited in hardware.datasheet.flops.items())),
            calibration.matmul_fraction,
            calibration.fp32_matmul_fraction,
            calibration.memory_fraction,
            calibration.cuda,
            calibration.sustained_clock,
            calibration.product_scale,
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._key == other._key


@lru_cache(maxsize=65536)
def _product(key: Key, dtype: str, m: int, n: int, k: int, batch: int, sustained: bool, quiet: bool) -> float:
    hardware = key.hardware
    calibration = hardware.calibration
    size, of_result = ELEMENT_BYTES[dtype]
    flops, moved = 2.0 * m * n * k * batch, batch * (size * (m * k + k * n) + of_result * m * n)
    least = bound_s(hardware, flops, moved, dtype)
    flat = calibration.matmul_fraction
    if dtype == "fp32":
        flat = calibration.fp32_matmul_fraction or flat
    if flat is not None:
        return max(flops / (hardware.peak_flops(dtype) * flat), moved / _flat_bandwidth(hardware))
    fitted, chip = products_of(hardware), chip_of(hardware, dtype)
    if dtype == "fp32":  # on plain cores, not on tensor cores: the tiles' waves are the same, the rate is not
        fitted, rate = {**fitted, "power_slowdown": 0.0}, fp32_rate(hardware) / max(fitted["tiles"].values())
    else:
        rate = device_rate(hardware)
        if sustained:
            fitted = {**fitted, "power_slowdown": power_slowdown(hardware)}
    chip = chip._replace(flops_per_s=chip.flops_per_s * rate)
    sizes = {"element_bytes": size, "result_bytes": of_result}
    how: dict[str, Any] = {**sizes, "sustained": sustained, "quiet": float(quiet)}
    seconds = product_s(SCALARS, chip, fitted, m, n, k, batch, **how)
    if batch == 1 and dtype in ("fp16", "bf16"):
        seconds *= shape_factor(hardware, m, n, k)
    _, second, longest = sorted((m, n, k))
    if second <= THIN and longest > LONG:
        return max(min(seconds, memory(hardware, "reduction", moved)), least)
    if dtype == "fp32" and k <= THIN:
        seconds = max(seconds, _thin_s(hardware, of_result * m * n * batch))
    return max(seconds * calibration.product_scale, least)


def _thin_s(hardware: Hardware, result_bytes: float) -> float:
    """The least seconds of a product in fp32 whose factors have few columns: it only writes its result."""
    launch_s = memory_of(hardware, "elementwise")["launch_us"] * 1e-6
    return launch_s + result_bytes / (document()["blocks"]["thin"]["bytes_per_s"] * hardware.sm_count)


def _flat_bandwidth(hardware: Hardware) -> float:
    return hardware.memory_bandwidth * (hardware.calibration.memory_fraction or 1.0)


def _links(hardware: Hardware, ranks: int) -> tuple[str, str, float]:
    """For `ranks` GPUs of one machine: the name of the measured links that are most like theirs, the number
    of ranks whose measurements count there, and how many times as fast the device's links are, by datasheet.
    Bridges join pairs: more than two GPUs communicate over PCIe."""
    link, host = hardware.datasheet.gpu_link.value, hardware.datasheet.host_link.value
    if link >= 200e9:
        newer = float(hardware.datasheet.compute_capability) >= 9
        name, measured = ("nvswitch_9.0", 450e9) if newer else ("nvswitch_8.0", 300e9)
        return name, str(ranks), link / measured
    if hardware.name.startswith(NO_PEERS):  # GeForce: through the host's memory
        reached = host * hardware.calibration.host_link_fraction / Calibration().host_link_fraction
        return "pcie", "2", min(1.0, reached / PCIE_MEASURED)
    if link > host and ranks == 2:
        return BRIDGE, "2", link / 300e9
    return BRIDGE, "4", host / PCIE_MEASURED
