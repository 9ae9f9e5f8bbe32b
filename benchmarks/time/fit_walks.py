"""How many bytes a second one multiprocessor moves by each walk of harness/kernels/walks.py.

From the steps of profiles/h100/kernels.csv.gz, which a profiler saw on an H100. Those of the recipes ASIDE
are not fitted to: what is written beside a rate is how far off it is for them.
"""

import csv
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.time.residuals import residuals
from harness.hardware.hardware import find_hardware
from harness.kernel_time import memory
from harness.kernel_time.estimates import THIN
from harness.kernels.cost import operator_bytes, tensor_bytes
from harness.kernels.walks import BY_NAME, Walk, walk_of
from harness.system.locations import profiles_folder

DEVICE = "h100"
ASIDE = ("gemma-2-2b-lora", "gpt2-medium-lora")
FEWEST_BYTES = 8e6
"""Of smaller kernels the launch is a large part."""
MANY = 512
"""The shortest side of a product whose rate is taken."""
SOURCE = "profiles/h100/kernels.csv.gz"
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

    recipe: str
    walk: Walk
    moved_bytes: int
    seconds: float


def walked() -> Iterator[Walked]:
    """Every operator of the steps that has a walk, by recipe and shapes."""
    for row in _table():
        space, _, name = row["operator"].partition("::")
        seconds = float(row["measured_us"]) * 1e-6
        if row["recipe"].startswith("llama-3.2-1b") and name.removeprefix("_foreach_") in PASSES:
            width = 2 if row["recipe"].endswith("bf16") else 4
            moved = PASSES[name.removeprefix("_foreach_")] * PARAMETERS * width
            yield Walked(row["recipe"], "foreach", moved, seconds)
            continue
        if name == "dequantize_4bit":
            (packed, *_), (blocks, *_) = json.loads(row["sizes"])[:2]
            yield Walked(row["recipe"], "dequantize", packed * (1 + 2 * 2) + blocks * 4, seconds)
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
            yield Walked(row["recipe"], walk, moved, seconds)


def fit_walks() -> dict[str, Any]:
    """By walk: `bytes_per_s` of one multiprocessor, and how far off it is."""
    hardware = find_hardware(DEVICE)
    fitted: dict[str, list[float]] = defaultdict(list)
    aside: dict[str, list[Walked]] = defaultdict(list)
    for each in walked():
        if each.moved_bytes < FEWEST_BYTES:
            continue
        if each.recipe in ASIDE:
            aside[each.walk].append(each)
        else:
            fitted[each.walk].append(each.moved_bytes / each.seconds / hardware.sm_count)
    found = {}
    for walk, rates in sorted(fitted.items()):
        rate = round(statistics.median(rates))
        estimated = [
            max(memory(hardware, "elementwise", row.moved_bytes, held_share=0.0),
                row.moved_bytes / rate / hardware.sm_count)
            for row in aside[walk]
        ]  # fmt: skip
        found[walk] = {"bytes_per_s": rate, "count": len(rates), "source": SOURCE}
        if estimated:
            found[walk]["aside"] = residuals([row.seconds for row in aside[walk]], estimated)
    return found | {"thin": _fit_thin()}


def _fit_thin() -> dict[str, Any]:
    """The bytes of its result that one multiprocessor writes a second in a product in fp32 of a small inner
    size, beyond the time of a launch."""
    hardware = find_hardware(DEVICE)
    launch_s = memory(hardware, "elementwise", 0.0)
    rates, kept = [], []
    for recipe, (m, n, k), seconds in _products("float"):
        result_bytes = 4 * m * n
        if k > THIN or result_bytes < FEWEST_BYTES:
            continue
        if recipe in ASIDE:
            kept.append((seconds, result_bytes))
        else:
            rates.append(result_bytes / (seconds - launch_s) / hardware.sm_count)
    rate = round(statistics.median(rates))
    estimated = [launch_s + moved / rate / hardware.sm_count for _, moved in kept]
    off = residuals([seconds for seconds, _ in kept], estimated)
    return {"bytes_per_s": rate, "count": len(rates), "source": SOURCE, "aside": off}


def fit_unaligned() -> dict[str, Any]:
    """FLOP/s of one multiprocessor in 16-bit products with a side that is no multiple of 8."""
    multiprocessors = find_hardware(DEVICE).sm_count
    rates = [
        2 * m * n * k / seconds / multiprocessors
        for _, (m, n, k), seconds in _products("c10::BFloat16")
        if m % 8 == 0 and (k % 8 or n % 8) and min(m, n, k) >= MANY
    ]
    return {"flops_per_s": round(statistics.median(rates)), "count": len(rates), "source": SOURCE}


def _products(dtype: str) -> Iterator[tuple[str, tuple[int, int, int], float]]:
    """The recipe, m, n and k, and the seconds of each product of two matrices of one dtype."""
    for row in _table():
        if row["operator"] == "aten::mm" and json.loads(row["dtypes"]) == [dtype, dtype]:
            (m, k), (_, n) = json.loads(row["sizes"])
            yield row["recipe"], (m, n, k), float(row["measured_us"]) * 1e-6


def _table() -> Iterator[dict[str, str]]:
    with gzip.open(profiles_folder() / DEVICE / "kernels.csv.gz", "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


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
