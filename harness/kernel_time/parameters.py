"""The fitted parameters by architecture, from parameters.json, which benchmarks/time/fit.py writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from harness.hardware import Hardware
from harness.kernel_time.memory_kernels import LIKE

FILE = Path(__file__).with_name("parameters.json")

LIKE_ARCHITECTURE = {"7.0": "8.0", "7.5": "8.6", "8.9": "8.6", "10.0": "9.0", "10.3": "10.0", "12.0": "8.6"}
"""The architecture whose parameters stand in for one without any, by compute capability. Data-centre chips
with HBM take those of such a chip, chips with GDDR memory those of the A40."""
SAME_CHIP = {"a100-40gb": "a100-80gb", "h200": "h100", "v100-32gb": "v100-16gb"}
"""The measured device with the same chip: such a device counts as measured, except for its memory's rate."""


@dataclass(frozen=True)
class Spread:
    """Measured over estimated seconds: 10th and 90th percentile of kernels that the fit did not use."""

    low: float
    high: float

    def wider(self, other: "Spread") -> "Spread":
        """The spread with a second uncertainty on top of this one: their factors are multiplied."""
        return Spread(self.low * min(1.0, other.low), self.high * max(1.0, other.high))


@cache
def document() -> Mapping[str, Any]:
    """The content of parameters.json."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@lru_cache(maxsize=512)
def of_architecture(part: str, capability: str) -> tuple[str, Mapping[str, Any]]:
    """The compute capability of the architecture that stands for `capability`, and its parameters of one
    part: "products", "memory" or "attention"."""
    known: Mapping[str, Any] = document()[part]
    name = capability if capability in known else LIKE_ARCHITECTURE.get(capability, "8.0")
    if name not in known:
        name = "8.0" if "8.0" in known else next(iter(known))
    return name, known[name]


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def measured_as(part: str, hardware: Hardware) -> str:
    """What stands for the device's "products" or "memory": a compute capability, with the release of CUDA
    where another one was measured, too ("9.0-cuda13")."""
    name, _ = of_architecture(part, hardware.datasheet.compute_capability)
    with_release = f"{name}-cuda{hardware.calibration.cuda}"
    return with_release if with_release in document()[part] else name


def fitted_products(hardware: Hardware) -> Mapping[str, Any]:
    """The parameters of products in 16 bit, as fitted to the device's architecture."""
    return document()["products"][measured_as("products", hardware)]["fitted"]


def products_of(hardware: Hardware) -> Mapping[str, Any]:
    """The parameters of products in 16 bit on this device."""
    fitted = fitted_products(hardware)
    if _large_products(hardware.name):
        fitted = {**fitted, "power_slowdown": power_slowdown(hardware)}
    return at_half_rate(fitted) if is_half_rate(hardware) else fitted


def device_rate(hardware: Hardware) -> float:
    """A factor on the datasheet's peak in 16 bit: the clock that large products of this device ran at, where
    these are all that was measured on it; else 1."""
    return _large_products(hardware.name).get("rate", 1.0)


def _large_products(name: str) -> Mapping[str, Any]:
    """What large products alone told of a device; empty where nobody reported any."""
    return document()["devices"].get(SAME_CHIP.get(name, name), {})


def _large_copies(name: str) -> Mapping[str, Any]:
    """What copies within its memory told of a device; empty where nobody reported any."""
    return document()["copies"]["devices"].get(SAME_CHIP.get(name, name), {})


HALF_RATE = 3.0
"""A ratio of 16-bit to fp32 FLOP/s below which tensor cores are halved: GeForce cards accumulate in fp32 at
half the rate of professional cards with the same chip, so that the ratio is 2 and not 4."""


def is_half_rate(hardware: Hardware) -> bool:
    """Whether tensor cores accumulate in fp32 at half their rate, as in GeForce cards since the GA102."""
    flops = hardware.datasheet.flops
    return flops["fp16"].value / flops["fp32"].value < HALF_RATE


def at_half_rate(fitted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of products where only the tensor cores are halved: what a tile takes besides its
    multiply-adds is then half as large a share of its time."""
    return {**fitted, "tiles": {name: 2 * rate / (1 + rate) for name, rate in fitted["tiles"].items()}}


def attention_architecture(hardware: Hardware) -> str:
    """The compute capability whose attention rates a device takes. Among cards with GDDR memory these are an
    RTX 4090's where the tensor cores are halved, and otherwise an RTX A5000's."""
    capability = hardware.datasheet.compute_capability
    if capability in document()["attention"] or LIKE_ARCHITECTURE.get(capability) == "8.6":
        if is_half_rate(hardware):
            return "8.9"
        return "8.6" if capability in ("7.5", "8.6", "8.9", "12.0") else capability
    return capability


def power_slowdown(hardware: Hardware) -> float:
    """By what share products take longer than at the boost clock, once the device has been at work for long:
    by its calibration; else as its architecture's clock fell when measured, and at least as was fitted.

    The limit is a card's and not its architecture's. In the rate of a card whose large products were reported
    it is contained: nothing is added.
    """
    own = hardware.calibration.sustained_clock
    if own is not None:
        return 1 / own - 1
    if _large_products(hardware.name):
        return 0.0
    clocks, capability = document()["sustained_clock"], hardware.datasheet.compute_capability
    name = capability if capability in clocks else LIKE_ARCHITECTURE.get(capability, "")
    seen = 1 / clocks[name]["fraction"] - 1 if name in clocks else 0.0
    return max(seen, fitted_products(hardware)["power_slowdown"])


def limit_reached(hardware: Hardware) -> tuple[float, float] | None:
    """The shares of a step's time in products of 16 bit up to which the device keeps its boost clock, and
    from which on it is at its power limit; None where nobody saw that."""
    if hardware.calibration.sustained_clock is not None:
        return None
    found = document()["sustained_clock"].get(hardware.datasheet.compute_capability, {})
    return (found["free"], found["full"]) if "free" in found else None


def fp32_rate(hardware: Hardware) -> float:
    """The share of fp32's peak that large products in fp32 reach: on the device, else on its architecture,
    else the median of the measured architectures."""
    found = document()["fp32_products"]
    for name in (hardware.name, hardware.datasheet.compute_capability):
        if name in found:
            return found[name]["rate"]
    return _middle([each["rate"] for name, each in found.items() if name[0].isdigit()])


@lru_cache(maxsize=1024)
def fitted_memory(architecture: str, kind: str) -> Mapping[str, float]:
    """The parameters of kernels of a kind that memory limits, on what `measured_as` names. A kind that was
    measured on other architectures only is as much slower than an elementwise kernel as it is there."""
    kinds: Mapping[str, Any] = document()["memory"][architecture]
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
    return {
        **plain,
        "rate": plain["rate"] * slower,
        "l2_bytes_per_flop": plain["l2_bytes_per_flop"] * slower,
    }


@lru_cache(maxsize=1024)
def _on_device(name: str, architecture: str, kind: str) -> Mapping[str, float]:
    fitted = fitted_memory(architecture, kind)
    copies = _large_copies(name)
    if not copies:
        return fitted
    rate = fitted["rate"] * copies["rate"] / fitted_memory(architecture, "elementwise")["rate"]
    return {**fitted, "rate": rate}


def memory_of(hardware: Hardware, kind: str) -> Mapping[str, float]:
    """The parameters of kernels of a kind that memory limits, on this device. Where only PyTorch's copies
    were measured on it, all kinds differ from those of its architecture as much as the copies."""
    return _on_device(hardware.name, measured_as("memory", hardware), kind)


@lru_cache(maxsize=256)
def fitted_attention(capability: str, kernel: str, direction: str) -> Mapping[str, Mapping[str, float]]:
    """The parameters of attention by head size. A kernel or direction that was not measured on an
    architecture takes the rates of one that was (in the end FlashAttention 2 forward), times the ratio of the
    two on another architecture where both were measured."""
    _, kernels = of_architecture("attention", capability)
    found = _measured(kernels, kernel, direction)
    if found is not None:
        return found
    for elsewhere in ("8.0", "9.0"):
        kernels_there = document()["attention"][elsewhere]
        for base in ((kernel, "forward"), ("flash2", direction), ("flash2", "forward")):
            base_here, base_there = _measured(kernels, *base), _measured(kernels_there, *base)
            there = _measured(kernels_there, kernel, direction)
            if base_here and base_there and there:
                return {size: _scaled(size, here, base_there, there) for size, here in base_here.items()}
    if kernel == "flash2":  # of an architecture that nobody measured forward: as data-centre chips
        return document()["attention"]["8.0"]["flash2"][direction]["fitted"]
    return fitted_attention(capability, "flash2", direction)


def _measured(kernels: Mapping[str, Any], kernel: str, direction: str) -> Mapping[str, Any] | None:
    return kernels[kernel][direction]["fitted"] if direction in kernels.get(kernel, {}) else None


def _scaled(
    size: str, base_here: Mapping[str, float], base_there: Mapping[str, Any], there: Mapping[str, Any]
) -> Mapping[str, float]:
    """`there` with its rate times `base_here`'s over `base_there`'s, at the nearest head sizes."""

    def nearest(sizes: Mapping[str, Any]) -> Mapping[str, float]:
        return sizes[min(sizes, key=lambda known: abs(int(known) - int(size)))]

    fitted = nearest(there)
    return {**fitted, "rate": base_here["rate"] * fitted["rate"] / nearest(base_there)["rate"]}


@lru_cache(maxsize=256)
def spread(hardware_name: str, architecture: str, kind: str) -> Spread:
    """How far off estimates of a kind of kernel are on a device: wider where the device was not measured.
    `architecture`: a compute capability, or what `measured_as` says."""
    spreads: Mapping[str, Any] = document()["spread"]
    found = spreads[kind] if kind in spreads else spreads["memory"]
    known: Mapping[str, Sequence[float]] = found["by_architecture"]
    name = architecture if architecture in known else LIKE_ARCHITECTURE.get(architecture, "")
    own = Spread(*known.get(name, found["all"]))
    if SAME_CHIP.get(hardware_name, hardware_name) in document()["measured_devices"]:
        return own
    if kind == "product" and _large_products(hardware_name).get("count"):
        return own.wider(Spread(*found["reported"]))
    return own.wider(Spread(*found["elsewhere"]))


def is_measured(hardware: Hardware) -> bool:
    """Whether kernels were measured on this device, or on one with the same chip."""
    return SAME_CHIP.get(hardware.name, hardware.name) in document()["measured_devices"]


def _reported(hardware: Hardware) -> str:
    """The reports, in words, that this device's clock comes from; "" where nobody reported any."""
    found = _large_products(hardware.name)
    number = found.get("count", 0)
    if not number:
        return ""
    clocked = f"{number} report{'s' * (number != 1)} of its large products ({found['source']})"
    copies = _large_copies(hardware.name)
    return f"{clocked} and one of its copies ({copies['source']})" if copies.get("count") else clocked


def where_from(hardware: Hardware) -> str:
    """Where the rates of a device come from, in words."""
    calibration = hardware.calibration
    if calibration.matmul_fraction is not None:
        return calibration.source
    key = measured_as("products", hardware)
    found, name = document()["products"][key], key.partition("-")[0]
    measured = found["device"].replace("-cuda", " with CUDA ")
    counted = f"{found['count']:,} measured products of {measured} ({found['source']})"
    if is_measured(hardware):
        own = f"fitted to {counted}"
    elif reported := _reported(hardware):
        own = f"clocked by {reported}, otherwise as compute capability {name}: {counted}"
    else:
        own = f"nobody measured this device: as of compute capability {name}, {counted}, by its own datasheet"
    scaled = calibration.product_scale, calibration.attention_scale, calibration.memory_scale
    return own if scaled == (1.0, 1.0, 1.0) else f"{own}; {calibration.source}"
