"""How many bytes a second one multiprocessor moves by each walk of harness/kernels/walks.py.

From the steps of profiles/<device>/kernels.csv.gz, which a profiler saw on an H100 and on an H200: with the
same multiprocessors and another memory they tell how the two together limit a kernel. Those of the recipes
ASIDE are not fitted to: what is written beside a rate is how far off it is for them.
"""

import csv
import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.time import CARDS
from benchmarks.time.residuals import residuals
from harness.hardware.hardware import find_hardware
from harness.kernel_time import memory
from harness.kernel_time.estimates import THIN
from harness.kernels.cost import operator_bytes, tensor_bytes
from harness.kernels.walks import BY_NAME, Walk, walk_of
from harness.system.locations import profiles_folder

POWERS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""See harness.kernel_time.memory: the higher, the less does the shorter of two times count."""
ASIDE = ("gemma-2-2b-lora", "gpt2-medium-lora")
FEWEST_BYTES = 8e6
"""Of smaller kernels the launch is a large part."""
MANY = 512
"""The shortest side of a product whose rate is taken."""
SOURCE = " and ".join(f"profiles/{device}/kernels.csv.gz" for device in CARDS)
DTYPES = {
    "float": torch.float32,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "bool": torch.bool,
    "int": torch.int32,
    "long int": torch.int64,
}
"""By what the profiler calls them."""


PARAMETERS = 1_235_814_400
"""Of Llama-3.2-1B, over whose weights, one after the other, the optimizer's lists of tensors go: the table
has no shapes of lists."""
PASSES = {"add_": 2, "mul_": 2, "div_": 2, "sqrt": 2, "addcmul_": 3, "lerp_": 3, "addcdiv_": 4}
"""By operator, without _foreach_: how often it reads or writes a number for each weight."""


class Walked(NamedTuple):
    """An operator of a step."""

    device: str
    recipe: str
    walk: Walk
    moved_bytes: int
    seconds: float
    elements: int = 0
    """Of a walk that counts them, and not bytes."""

    @property
    def memory_s(self) -> float:
        """What it would take if memory alone limited it."""
        return memory(find_hardware(self.device), "elementwise", self.moved_bytes, held_share=0.0)

    @property
    def _of_one(self) -> float:
        """What one multiprocessor walks through."""
        return (self.elements or self.moved_bytes) / find_hardware(self.device).sm_count

    def rate(self, power: float) -> float:
        """The bytes, or elements, a second of one multiprocessor that would explain its time; infinite if
        memory does."""
        left = self.seconds**power - self.memory_s**power
        return self._of_one / left ** (1 / power) if left > 0 else math.inf

    def estimated(self, rate: float, power: float) -> float:
        """Its seconds by a rate and a power."""
        walk_s = self._of_one / rate
        return (self.memory_s**power + walk_s**power) ** (1 / power)


def walked() -> Iterator[Walked]:
    """Every operator of the steps that has a walk, by recipe and shapes."""
    for device, row in _table():
        space, _, name = row["operator"].partition("::")
        seconds = float(row["measured_us"]) * 1e-6
        passes = PASSES.get(name.removeprefix("_foreach_")) if name.startswith("_foreach_") else None
        if row["recipe"].startswith("llama-3.2-1b") and passes is not None:
            moved = passes * PARAMETERS * (2 if row["recipe"].endswith("bf16") else 4)
            yield Walked(device, row["recipe"], "foreach", moved, seconds, PARAMETERS)
            continue
        if name == "dequantize_4bit":
            (packed, *_), (blocks, *_) = json.loads(row["sizes"])[:2]
            moved = packed * (1 + 2 * 2) + blocks * 4
            yield Walked(device, row["recipe"], "dequantize", moved, seconds)
            continue
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        given = _given(row)
        if packet is None or not given:
            continue
        try:
            out = given[0] if name in BY_NAME else packet(*given)
        except (RuntimeError, TypeError, ValueError):  # it takes numbers that the table does not have
            continue
        func = getattr(packet, packet.overloads()[0])
        if (walk := walk_of(func, given, out)) is not None:
            moved = operator_bytes(func, given, {}, out, ())
            if name == "sum":  # over which dimensions, and so how large its result is, the table does not say
                moved -= tensor_bytes(out)
            yield Walked(device, row["recipe"], walk, moved, seconds)


def fit_walks() -> dict[str, Any]:
    """By walk: `bytes_per_s` or `elements_per_s` of one multiprocessor, the `power` by which memory's time is
    added to what that takes, and how far off both are."""
    rows: dict[Walk, list[Walked]] = defaultdict(list)
    for each in walked():
        if each.moved_bytes >= FEWEST_BYTES:
            rows[each.walk].append(each)
    found = {}
    for walk, every in sorted(rows.items()):
        fitted = [row for row in every if row.recipe not in ASIDE]
        aside = [row for row in every if row.recipe in ASIDE]
        off: dict[tuple[float, float], float] = {}
        for power in POWERS:
            rate = statistics.median(row.rate(power) for row in fitted)
            off[rate, power] = statistics.median(
                abs(row.estimated(rate, power) / row.seconds - 1) for row in fitted
            )
        rate, power = min(off, key=lambda each: off[each])
        counted = "elements_per_s" if every[0].elements else "bytes_per_s"
        found[walk] = {counted: round(rate), "power": power, "count": len(fitted), "source": SOURCE}
        if aside:
            estimated = [row.estimated(rate, power) for row in aside]
            found[walk]["aside"] = residuals([row.seconds for row in aside], estimated)
    return found | {"thin": _fit_thin()}


def _fit_thin() -> dict[str, Any]:
    """The bytes of its result that one multiprocessor writes a second in a product in fp32 of a small inner
    size, beyond the time of a launch."""
    rates, kept = [], []
    for device, recipe, (m, n, k), seconds in _products("float"):
        hardware = find_hardware(device)
        launch_s = memory(hardware, "elementwise", 0.0)
        result_bytes = 4 * m * n
        if k > THIN or result_bytes < FEWEST_BYTES:
            continue
        if recipe in ASIDE:
            kept.append((seconds, launch_s, result_bytes / hardware.sm_count))
        else:
            rates.append(result_bytes / (seconds - launch_s) / hardware.sm_count)
    rate = round(statistics.median(rates))
    estimated = [launch_s + of_one / rate for _, launch_s, of_one in kept]
    off = residuals([seconds for seconds, *_ in kept], estimated)
    return {"bytes_per_s": rate, "count": len(rates), "source": SOURCE, "aside": off}


def fit_unaligned() -> dict[str, Any]:
    """FLOP/s of one multiprocessor in 16-bit products with a side that is no multiple of 8."""
    rates = [
        2 * m * n * k / seconds / find_hardware(device).sm_count
        for device, _, (m, n, k), seconds in _products("c10::BFloat16")
        if m % 8 == 0 and (k % 8 or n % 8) and min(m, n, k) >= MANY
    ]
    return {"flops_per_s": round(statistics.median(rates)), "count": len(rates), "source": SOURCE}


def _products(dtype: str) -> Iterator[tuple[str, str, tuple[int, int, int], float]]:
    """The device, the recipe, m, n and k, and the seconds of each product of two matrices of one dtype."""
    for device, row in _table():
        if row["operator"] == "aten::mm" and json.loads(row["dtypes"]) == [dtype, dtype]:
            (m, k), (_, n) = json.loads(row["sizes"])
            yield device, row["recipe"], (m, n, k), float(row["measured_us"]) * 1e-6


def _table() -> Iterator[tuple[str, dict[str, str]]]:
    """Every row of each device's table."""
    for device in CARDS:
        path = profiles_folder() / device / "kernels.csv.gz"
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                yield device, row


def _given(row: dict[str, str]) -> list[Any]:
    """The tensors that the operator was given, shape only; cat's as one list."""
    described = zip(*(json.loads(row[name]) for name in ("sizes", "dtypes", "strides")), strict=True)
    given: list[Any] = []
    for sizes, dtype, strides in described:
        if dtype == "TensorList":
            given.append([_tensor(*each, torch.bfloat16) for each in zip(sizes, strides, strict=True)])
        elif dtype in DTYPES:
            given.append(_tensor(sizes, strides, DTYPES[dtype]))
    return given


def _tensor(sizes: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
