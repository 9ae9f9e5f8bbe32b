"""What was fitted, by architecture: read from parameters.json, which benchmarks/time/fit.py writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from harness.hardware import Hardware
from harness.kernel_time.memory_kernels import LIKE

FILE = Path(__file__).with_name("parameters.json")

LIKE_ARCHITECTURE = {"7.0": "8.0", "7.5": "8.6", "8.9": "8.6", "10.0": "9.0", "10.3": "9.0", "12.0": "8.6"}
"""By compute capability: the architecture whose parameters stand in for one that has none. Data-centre chips
with HBM take those of such a chip, those with GDDR memory those of the A40."""
SAME_CHIP = {"a100-40gb": "a100-80gb", "h200": "h100", "v100-32gb": "v100-16gb"}
"""The same chip with other memory: measured, but for the memory's rate."""


@dataclass(frozen=True)
class Spread:
    """Measured over estimated: 10th and 90th percentile of the kernels that were kept aside."""

    low: float
    high: float

    def wider(self, other: "Spread") -> "Spread":
        """Both uncertainties, one after the other."""
        return Spread(self.low * min(1.0, other.low), self.high * max(1.0, other.high))


@cache
def document() -> Mapping[str, Any]:
    """parameters.json."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@lru_cache(maxsize=512)
def of_architecture(part: str, capability: str) -> tuple[str, Mapping[str, Any]]:
    """The parameters of one part ("products", "memory", "attention") for a compute capability, and that of
    the architecture that they were fitted to."""
    known: Mapping[str, Any] = document()[part]
    name = capability if capability in known else LIKE_ARCHITECTURE.get(capability, "8.0")
    if name not in known:
        name = "8.0" if "8.0" in known else next(iter(known))
    return name, known[name]


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def fitted_products(hardware: Hardware) -> Mapping[str, Any]:
    """Of products in 16 bit, as the architecture's were measured."""
    return of_architecture("products", hardware.datasheet.compute_capability)[1]["fitted"]


def products_of(hardware: Hardware) -> Mapping[str, Any]:
    """Of products in 16 bit on this device."""
    fitted = fitted_products(hardware)
    return at_half_rate(fitted) if is_half_rate(hardware) else fitted


def device_rate(hardware: Hardware) -> float:
    """Times the datasheet's peak in 16 bit: the clock that products of this device were seen to run at, where
    that is all that is known of it."""
    return _large_products(hardware.name).get("rate", 1.0)


def _large_products(name: str) -> Mapping[str, Any]:
    """What is known of a device by them alone; empty where nothing is."""
    return document()["devices"].get(SAME_CHIP.get(name, name), {})


def _large_copies(name: str) -> Mapping[str, Any]:
    """The same by copies within its memory."""
    return document()["copies"]["devices"].get(SAME_CHIP.get(name, name), {})


HALF_RATE = 3.0
"""16-bit FLOP/s over those of fp32: GeForce cards add up in fp32 at half of the rate of the professional ones
with the same chip, which is 2 times that of fp32 and not 4."""


def is_half_rate(hardware: Hardware) -> bool:
    """Whether tensor cores that add up in fp32 are halved, as in GeForce cards since the GA102."""
    flops = hardware.datasheet.flops
    return flops["fp16"].value / flops["fp32"].value < HALF_RATE


def at_half_rate(fitted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of products where the tensor cores are halved and nothing else is: what a tile takes beside
    its multiply-adds is half as much of its time."""
    return {**fitted, "tiles": {name: 2 * rate / (1 + rate) for name, rate in fitted["tiles"].items()}}


def attention_architecture(hardware: Hardware) -> str:
    """Whose rates attention has: of cards with GDDR memory those of an RTX 4090 where the tensor cores are
    halved, and otherwise those of an RTX A5000."""
    capability = hardware.datasheet.compute_capability
    if capability in document()["attention"] or LIKE_ARCHITECTURE.get(capability) == "8.6":
        if is_half_rate(hardware):
            return "8.9"
        return "8.6" if capability in ("7.5", "8.6", "8.9", "12.0") else capability
    return capability


def power_slowdown(hardware: Hardware) -> float:
    """By how much products take longer than at the boost clock, when the device has been at work for long: as
    its calibration says, as its architecture's clock was seen to fall, or at the least as was fitted."""
    own = hardware.calibration.sustained_clock
    if own is not None:
        return 1 / own - 1
    clocks, capability = document()["sustained_clock"], hardware.datasheet.compute_capability
    name = capability if capability in clocks else LIKE_ARCHITECTURE.get(capability, "")
    seen = 1 / clocks[name]["fraction"] - 1 if name in clocks else 0.0
    return max(seen, fitted_products(hardware)["power_slowdown"])


def fp32_rate(hardware: Hardware) -> float:
    """Share of fp32's peak that large products in fp32 reach: of the device, of its architecture, or the
    middle
    of those that were measured."""
    found = document()["fp32_products"]
    for name in (hardware.name, hardware.datasheet.compute_capability):
        if name in found:
            return found[name]["rate"]
    return _middle([each["rate"] for name, each in found.items() if name[0].isdigit()])


@lru_cache(maxsize=1024)
def fitted_memory(capability: str, kind: str) -> Mapping[str, float]:
    """Of kernels of a kind that wait for memory. A kind that was measured on other architectures only is as
    much slower than an elementwise kernel as it is there."""
    _, kinds = of_architecture("memory", capability)
    while kind in LIKE and kind not in kinds:
        kind = LIKE[kind]
    if kind in kinds:
        return kinds[kind]["fitted"]
    plain = kinds["elementwise"]["fitted"]
    elsewhere = document()["memory"].values()
    rates = [
        other[kind]["fitted"]["rate"] / other["elementwise"]["fitted"]["rate"]
        for other in elsewhere
        if kind in other and "elementwise" in other
    ]
    slower = min(1.0, _middle(rates)) if rates else 1.0
    return {**plain, "rate": plain["rate"] * slower, "l2_rate": plain["l2_rate"] * slower}


@lru_cache(maxsize=1024)
def _on_device(name: str, capability: str, kind: str) -> Mapping[str, float]:
    fitted = fitted_memory(capability, kind)
    copies = _large_copies(name)
    if not copies:
        return fitted
    rate = fitted["rate"] * copies["rate"] / fitted_memory(capability, "elementwise")["rate"]
    return {**fitted, "rate": rate, "l2_rate": max(fitted["l2_rate"], rate)}


def memory_of(hardware: Hardware, kind: str) -> Mapping[str, float]:
    """Of kernels of a kind that wait for memory, on this device: as fast beside those of its architecture as
    PyTorch's copies on it, where these are all that was measured."""
    return _on_device(hardware.name, hardware.datasheet.compute_capability, kind)


@lru_cache(maxsize=256)
def fitted_attention(capability: str, kernel: str, direction: str) -> Mapping[str, Mapping[str, float]]:
    """By head size. A kernel or a direction that nobody measured on an architecture has the rates of one that
    was, FlashAttention 2 forward at the least, times what it loses against that on another architecture."""
    _, mine = of_architecture("attention", capability)
    found = _measured(mine, kernel, direction)
    if found is not None:
        return found
    for elsewhere in ("8.0", "9.0"):
        theirs = document()["attention"][elsewhere]
        for base in ((kernel, "forward"), ("flash2", direction), ("flash2", "forward")):
            own, other = _measured(mine, *base), _measured(theirs, *base)
            wanted = _measured(theirs, kernel, direction)
            if own and other and wanted:
                return {size: _scaled(size, each, other, wanted) for size, each in own.items()}
    if kernel == "flash2":  # of an architecture that nobody measured forward: as data-centre chips
        return document()["attention"]["8.0"]["flash2"][direction]["fitted"]
    return fitted_attention(capability, "flash2", direction)


def _measured(kernels: Mapping[str, Any], kernel: str, direction: str) -> Mapping[str, Any] | None:
    return kernels[kernel][direction]["fitted"] if direction in kernels.get(kernel, {}) else None


def _scaled(
    size: str, own: Mapping[str, float], other: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Mapping[str, float]:
    """The rate of `own` times that of `wanted` over that of `other`, at the nearest head sizes."""

    def nearest(sizes: Mapping[str, Any]) -> Mapping[str, float]:
        return sizes[min(sizes, key=lambda each: abs(int(each) - int(size)))]

    there = nearest(wanted)
    return {**there, "rate": own["rate"] * there["rate"] / nearest(other)["rate"]}


@lru_cache(maxsize=256)
def spread(hardware_name: str, capability: str, kind: str) -> Spread:
    """How far off estimates of a kind of kernel are on a device: wider where nobody measured it."""
    spreads: Mapping[str, Any] = document()["spread"]
    found = spreads[kind] if kind in spreads else spreads["memory"]
    name = LIKE_ARCHITECTURE.get(capability, capability)
    mine = found["by_architecture"].get(name, found["all"])
    own = Spread(*mine)
    if SAME_CHIP.get(hardware_name, hardware_name) in document()["measured_devices"]:
        return own
    if kind == "product" and _large_products(hardware_name).get("count"):
        return own.wider(Spread(*found["reported"]))
    return own.wider(Spread(*found["elsewhere"]))


def is_measured(hardware: Hardware) -> bool:
    """Whether kernels were measured on this device, or on one with the same chip."""
    return SAME_CHIP.get(hardware.name, hardware.name) in document()["measured_devices"]


def _reported(hardware: Hardware) -> str:
    """Whose large products this device's clock comes from; "" of one that nobody reported."""
    found = _large_products(hardware.name)
    number = found.get("count", 0)
    if not number:
        return ""
    clocked = f"{number} report{'s' * (number != 1)} of its large products ({found['source']})"
    copies = _large_copies(hardware.name)
    return f"{clocked} and one of its copies ({copies['source']})" if copies.get("count") else clocked


def where_from(hardware: Hardware) -> str:
    """In words, where the rates of a device come from."""
    calibration = hardware.calibration
    if calibration.matmul_fraction is not None:
        return calibration.source
    name, found = of_architecture("products", hardware.datasheet.compute_capability)
    counted = f"{found['count']:,} measured products of {found['device']} ({document()['sources'][0]})"
    if is_measured(hardware):
        own = f"fitted to {counted}"
    elif reported := _reported(hardware):
        own = f"clocked by {reported}, otherwise as compute capability {name}: {counted}"
    else:
        own = f"nobody measured this device: as of compute capability {name}, {counted}, by its own datasheet"
    scaled = calibration.product_scale, calibration.attention_scale, calibration.memory_scale
    return own if scaled == (1.0, 1.0, 1.0) else f"{own}; {calibration.source}"
