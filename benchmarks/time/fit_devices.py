"""What large products and large copies reach on a device of which nobody has measured more than that.

Every row of benchmarks/time/large_products.csv is one person's card: the most FLOP/s of products of square
matrices of SIZES, the mean of 30 in a row each. Boost clocks and power limits are in it: a GeForce card
clocks higher than its datasheet's boost, a T4 or an L4 of 70 W much lower. What is fitted is one factor a
device: on the peak with which an estimate begins, so that the estimate of the same products has the middle
of the reports.

benchmarks/time/large_copies.csv has what PyTorch's `copy_` of half a GB reaches within a device's memory,
counted as read and written. Of cards whose elementwise kernels were measured, too, it says how far the two
lie apart.

benchmarks/time/chunk_cat.csv has how many elements a second FSDP2's `torch._chunk_cat` brings into one tensor
on an H100, by dtypes: its author's numbers.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.time.residuals import quantiles
from harness.hardware.hardware import all_hardware, find_hardware
from harness.kernel_time.estimates import chip_of
from harness.kernel_time.numbers import SCALARS
from harness.kernel_time.parameters import is_half_rate, products_of
from harness.kernel_time.products import product_s

REPORTS = Path(__file__).with_name("large_products.csv")
COPIES = Path(__file__).with_name("large_copies.csv")
CONCATENATIONS = Path(__file__).with_name("chunk_cat.csv")
CONCATENATED_BY = "github.com/pytorch/pytorch/pull/120678"
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
"""Of the dtypes that gradients have."""
COPIED_BY = "github.com/chsasank/device-benchmarks, README.md at 7ccc883"
SOURCE = "github.com/zzc0721/torch-performance-test-data, database.md at 9d82827"
SIZES = (1024, 2048, 4096, 8192, 10240)


def most_flops_per_s(device: str, dtype: str, rate: float) -> float:
    """Of products of SIZES, with `rate` times the datasheet's peak, at which the card is at its limit."""
    hardware = find_hardware(device)
    chip = chip_of(hardware, dtype)
    chip = chip._replace(flops_per_s=chip.flops_per_s * rate)
    fitted = {**products_of(hardware), "power_slowdown": 0.0}
    return max(2 * n**3 / product_s(SCALARS, chip, fitted, n, n, n, 1) for n in SIZES)


def reports() -> dict[tuple[str, str], list[float]]:
    """FLOP/s by device and dtype."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with REPORTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["device"], row["dtype"]].append(float(row["tflops"]) * 1e12)
    return found


def reported_spread() -> list[float]:
    """10th and 90th percentile of a card's seconds over those of the middle card of its kind, of all reports
    where there are several."""
    each = [found for found in reports().values() if len(found) > 1]
    return quantiles(statistics.median(found) / one for found in each for one in found)


def fit_devices(measured_devices: Collection[str]) -> dict[str, Any]:
    """By device: `rate`, the factor, and `flops_per_s`, the middle of `count` reports. A GeForce card without
    a report has the middle of its architecture's others and a count of 0: their power limits let all of them
    run at their boost clock. Those of `measured_devices` need no factor: more of their products are known.
    """
    found: dict[str, Any] = {}
    for (device, dtype), measured in sorted(reports().items()):
        if device in measured_devices:
            continue
        middle, low, high = statistics.median(measured), 0.1, 2.0
        while high - low > 1e-5:
            rate = (low + high) / 2
            slow = most_flops_per_s(device, dtype, rate) < middle
            low, high = (rate, high) if slow else (low, rate)
        found[device] = {
            "rate": round(high, 4),
            "count": len(measured),
            "dtype": dtype,
            "flops_per_s": middle,
            "source": SOURCE,
        }
    return found | _as_others(found)


def _as_others(found: Mapping[str, Any]) -> dict[str, Any]:
    """GeForce cards that are not `found`, each with the middle of its architecture's others."""
    geforce = [card for card in all_hardware() if is_half_rate(card) and card.name.startswith("rtx-")]
    guessed: dict[str, Any] = {}
    for card in geforce:
        capability = card.datasheet.compute_capability
        of_its_kind = [other.name for other in geforce if other.datasheet.compute_capability == capability]
        alike = [name for name in of_its_kind if name in found]
        if alike and card.name not in found:
            rate = statistics.median(found[name]["rate"] for name in alike)
            guessed[card.name] = {"rate": round(rate, 4), "count": 0, "source": f"as {', '.join(alike)}"}
    return guessed


def fit_copies(memory: Mapping[str, Any], measured: Collection[str]) -> dict[str, Any]:
    """By device: `rate`, the share of the datasheet's bandwidth that a copy reaches, and `count` reports. Of
    those `measured`, whose elementwise kernels gave the rates of `memory`, how fast these are beside it is
    kept under "elementwise_over_copy", and nothing is taken from it. A GeForce card without a report has the
    middle of its architecture's others and a count of 0: their memory is of a kind.
    """
    found: dict[str, Any] = {}
    beside: dict[str, float] = {}
    with COPIES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            hardware = find_hardware(row["device"])
            rate = float(row["gb_per_s"]) * 1e9 / hardware.memory_bandwidth
            if hardware.name in measured:
                fitted = memory[hardware.datasheet.compute_capability]["elementwise"]["fitted"]
                beside[hardware.name] = round(fitted["rate"] / rate, 4)
            else:
                found[hardware.name] = {"rate": round(rate, 4), "count": 1, "source": COPIED_BY}
    return {"devices": found | _as_others(found), "elementwise_over_copy": beside}


def fit_blocks() -> dict[str, Any]:
    """`torch._chunk_cat` of one dtype ("copy_in") and of bf16 into fp32 ("cast_in"): bytes read and written a
    second by one multiprocessor of the H100 on which it was measured.

    Each of its blocks writes 2 KiB, whatever the dtypes (cuda/TensorShape.cu: 128 threads, BYTES_PER_THREAD),
    and an H100 ends about half a billion of them a second, far fewer than its memory could take.
    """
    multiprocessors = find_hardware("h100").sm_count
    rates: dict[str, list[float]] = defaultdict(list)
    with CONCATENATIONS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            before, after = row["from"], row["to"]
            if before in ELEMENT_BYTES:
                moved = float(row["g_elements_per_s"]) * 1e9 * (ELEMENT_BYTES[before] + ELEMENT_BYTES[after])
                rates["copy_in" if before == after else "cast_in"].append(moved / multiprocessors)
    return {
        kind: {"bytes_per_s": round(statistics.median(each)), "count": len(each), "source": CONCATENATED_BY}
        for kind, each in rates.items()
    }
