"""The tables of docs/time.md, from time.json and peft.json in profiles/published: `python -m pages.time`.

`python -m benchmarks.time.published FILES` and `python -m benchmarks.time.peft_methods` make these files.
"""

import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.time import CARDS
from harness.hardware import all_hardware
from harness.kernel_time.parameters import document
from harness.report.table import markdown_table
from pages.parts import ROOT, with_parts, write_or_check
from pages.profiles.tables import kernels_table

RESULTS = ROOT / "profiles" / "published" / "time.json"
SLOW_HOSTS = ROOT / "profiles" / "cpu" / "slow_hosts.json"
HOST = ROOT / "profiles" / "cpu" / "host_times.json"
HOST_CALLS = ROOT / "profiles" / "h100" / "host_calls.json"
METHODS = ROOT / "profiles" / "published" / "peft.json"
IMAGES = ROOT / "profiles" / "published" / "resnet50.json"
PAGE = ROOT / "docs" / "time.md"
LARGEST = 12
"""Misses of published runs that the page lists."""
TORCHTUNE_PAIRS = (
    ("torchtune/opt-table/+activation checkpointing", "torchtune/opt-table/LoRA"),
    ("torchtune/opt-table/LoRA", "torchtune/opt-table/QLoRA"),
)
"""Of one table whose rows add a toggle each: full fine-tuning, LoRA, QLoRA, all compiled and checkpointed."""
FSDP_QLORA = re.compile(
    r"(?P<where>fsdp_qlora/.+)/(?P<method>Q?LoRA) (?P<how>.+)/b(?P<rows>\d+)/s(?P<length>\d+)"
)
SAME = ("where", "how", "length")
SLOW = "fsdp_qlora/RTX 3090/Llama-2-7B"
MISSES = {
    "mpt-30b/8192": "a GPU that is nearly full: twice the tokens a micro batch and slower than 4096, "
    "which no kernel explains; PyTorch gives cached memory back and asks again",
    "mpt-760m/A100-80GB": "the source's own rates drop here by a sixth against 2048 tokens, where products "
    "and attention are shorter; its 40 GB rows of the same model do not",
    "H100-80GB": "products beside NCCL's kernels, on a device at its power limit: how far the clock of an "
    "H100 falls was seen twice (1980 to 1575 and to 1500 MHz), and differs from card to card",
    "A100-40GB/32": "of its neighbours with 16 and 64 GPUs the source has 22 % more",
}


def parts(found: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables, by the name of their place."""
    told = (each for each in found["kernels"] if each["median"] is not None)
    whole = [each for each in told if each["kernel"].startswith("all ")]
    kernels = markdown_table(
        ("device", "kernels", "measured", "median error", "90th percentile"),
        [
            (
                each["device"],
                each["kernel"].removeprefix("all "),
                f"{each['count']:,}",
                f"{each['median']:.1%}",
                f"{each['p90']:.1%}",
            )
            for each in whole
        ],
        range(2, 5),
    )
    runs = markdown_table(
        ("GPU", "runs", "median error", "90th percentile", "largest", "middle, with its sign"),
        [
            (
                each["gpu"],
                str(each["count"]),
                *(f"{each[name]:.1%}" for name in ("median", "p90", "max")),
                f"{each['middle']:+.1%}",
            )
            for each in found["run_errors"]
        ],
        range(1, 6),
    )
    step = markdown_table(
        ("kernels", "measured, us", "estimated", "error"),
        [
            (row["what"], f"{row['measured_us']:,}", f"{row['estimated_us']:,.0f}", f"{row['error']:+.1%}")
            for row in found["step_kernels"]
        ],
        range(1, 4),
    )
    return {
        "kernels": kernels,
        "step": step,
        **{
            card: kernels_table(json.loads((ROOT / "profiles" / card / "kernels.json").read_bytes()))
            for card in CARDS
        },
        "slow_hosts": _slow_hosts(json.loads(SLOW_HOSTS.read_bytes())),
        "runs": runs,
        "misses": _misses(found["runs"]),
        "torchtune": _torchtune(found["recipes"]),
        "recipes": _recipes(found["recipes"]),
        "devices": _devices(),
        "host": _host(json.loads(HOST.read_bytes()), json.loads(HOST_CALLS.read_bytes())),
        "copies": _copies(),
        "pairs": _pairs(found["recipes"]),
        "methods": _methods(json.loads(METHODS.read_bytes())),
        "images": _images(json.loads(IMAGES.read_bytes())["rows"]),
    }


def _devices() -> str:
    """Cards of which large products or copies are known, from the parameters that are fitted to them."""
    products, copies = document()["devices"], document()["copies"]["devices"]
    rows = []
    for hardware in all_hardware():
        product, copied = products.get(hardware.name, {}), copies.get(hardware.name, {})
        row = [hardware.name, "", "", "", "", "", ""]
        if product.get("count"):
            reached, dtype = product["flops_per_s"], product["dtype"]
            share = f"{reached / hardware.peak_flops(dtype):.0%}"
            row[1:5] = dtype, str(product["count"]), f"{reached / 1e12:,.0f}", share
        if copied.get("count"):
            row[5:] = f"{copied['rate'] * hardware.memory_bandwidth / 1e9:,.0f}", f"{copied['rate']:.0%}"
        if any(row[1:]):
            rows.append(row)
    columns = (
        "device",
        "dtype",
        "reports",
        "TFLOP/s",
        "of the datasheet",
        "copies, GB/s",
        "of the datasheet",
    )
    return markdown_table(columns, rows, range(2, 7))


def _host(found: Mapping[str, Any], calls: Mapping[str, Mapping[str, float]]) -> str:
    """What the host takes, how far off it is, and how much one machine's host differed from run to run."""
    us = found["parameters"]
    by_launches = found["aside_by_launches_alone"]
    views = [each["transpose_us"] for each in calls.values()]
    text = (
        f"Fitted to {found['fitted']['count']} phases of steps, of PyTorch's own code on an "
        f"{found['processor'].replace('(R)', '')} with a virtual GPU (`{HOST.relative_to(ROOT)}`): "
        f"{us['launch_us']:.1f} us for an operator that launches, {us['operator_us']:.1f} for another, "
        f"{us['view_us']:.1f} for a view, {us['call_us']:.1f} for a call of a Python function. The "
        f"{found['aside']['count']} phases of recipes that nothing was fitted to are off by "
        f"{found['aside']['median']:.0%} in the median, and nine of ten by at most "
        f"{found['aside']['p90']:.0%}; with one time for every launch and nothing else it would be "
        f"{by_launches['median']:.0%} and {by_launches['p90']:.0%}. Driver and cuBLAS take no time there. On "
        f"the H100's machine a launch took {us['driver_us']:.1f} us and a product {us['product_us']:.0f} "
        f"more, in that trace of {len(calls)} in which they took least (`{HOST_CALLS.relative_to(ROOT)}`). "
        f"All together that is {us['mean_us']:.1f} us an operator, in the mean over a step of LoRA. That "
        f"machine's host cannot check these numbers closely: to transpose a tensor, which asks nothing of "
        f"the device, took {min(views):.1f} us in one run and {max(views):.1f} in another."
    )
    return textwrap.fill(text, 120, break_long_words=False)


def _slow_hosts(found: Mapping[str, Any]) -> str:
    """How much slower the hosts of measured cards were."""
    text = (
        f"Of {found['phases']} forwards and backwards measured on the H100 and the H200, "
        f"{found['phases_that_waited']} took at least a quarter longer than their kernels can explain. There "
        f"the host was waited for, and took {found['median']} times as long as the one that estimates take, "
        f"in the median, and up to {found['slow']} times in nine of ten "
        f"(`{SLOW_HOSTS.relative_to(ROOT)}`). A range ends where a host would that takes {found['slow']} "
        "times as long, if kernels do not take longer. Where a calibration says what a host takes for an "
        "operator (`host_op_s`, below), the range is of the kernels alone."
    )
    return textwrap.fill(text, 120, break_long_words=False)


def _copies() -> str:
    """How fast measured elementwise kernels are beside copies that others measured on such a card."""
    beside = document()["copies"]["elementwise_over_copy"].items()
    named = [f"{share:.0%} of it on {name}" for name, share in beside]
    return f"Where elementwise kernels were measured, too, they reach what a copy does: {', '.join(named)}."


def _methods(found: Mapping[str, Any]) -> str:
    """Steps of peft's methods, measured by their authors and estimated, the shortest first."""
    rows = sorted((row for row in found["rows"] if "error" in row), key=lambda row: row["measured_ms"])
    table = markdown_table(
        ("method", "measured, ms", "estimated", "from", "to", "error"),
        [
            (
                row["id"],
                *(f"{row[name]:,.0f}" for name in ("measured_ms", "estimated_ms", "from_ms", "to_ms")),
                f"{row['error']:+.1%}",
            )
            for row in rows
        ],
        range(1, 6),
    )
    whole = f"Of these {found['count']} the median error is {found['median']:.1%}, the 90th percentile"
    left_out = ", ".join(row["id"] for row in found["rows"] if "left_out" in row)
    return f"{table}\n{whole} {found['p90']:.1%}. Not simulated: {left_out}.\n"


def _misses(rows: Sequence[Mapping[str, Any]]) -> str:
    worst = sorted(rows, key=lambda row: -abs(row["error"]))[:LARGEST]
    columns = ("run", "model", "GPU", "GPUs", "tokens", "measured", "estimated", "error", "why")
    table = [
        (
            row["id"],
            row["model"],
            row["gpu"],
            str(row["gpus"]),
            str(row["seq_len"]),
            f"{row['measured']:,.0f}",
            f"{row['estimated']:,.0f}",
            f"{row['error']:+.1%}",
            _why(row),
        )
        for row in worst
    ]
    return markdown_table(columns, table, range(3, 8))


def _why(row: Mapping[str, Any]) -> str:
    keys = (
        f"{row['model']}/{row['seq_len']}",
        f"{row['model']}/{row['gpu']}",
        f"{row['gpu']}/{row['gpus']}",
        row["gpu"],
    )
    return next((MISSES[key] for key in keys if key in MISSES), "not found")


def _slow_lanes(rows: Sequence[Mapping[str, Any]]) -> str:
    """What is known of the machine whose links are not: how much longer its steps of LoRA are than by ddp."""
    cells = [(match, row["measured"]) for row in rows if (match := FSDP_QLORA.fullmatch(row["id"]))]
    lora = [(m, rate) for m, rate in cells if m["where"] == SLOW and m["method"] == "LoRA"]
    alone = next(rate for match, rate in lora if match["how"] == "ddp")
    tokens = [(2 * int(m["rows"]) * int(m["length"]), rate) for m, rate in lora if rate != alone]
    longer = sorted(count / rate - count / alone for count, rate in tokens)
    told = (
        "Of two RTX 3090 the weights' way between them is not known: their machine has "
        '"an older motherboard and slow PCI lanes", its author says, and no number. '
        "Rows without such traffic (`ddp`) are among those above. "
        "The others are estimated for the lanes of the datasheet and say what slow ones cost: "
        f"a step of LoRA takes {longer[0]:.1f} to {longer[-1]:.1f} s longer than by `ddp`, "
        "whatever the number of rows, as if nothing were computed while weights are on their way."
    )
    return textwrap.fill(told, 120) + "\n"


def _recipes(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    built = [row for row in rows if "estimated" in row]
    known = [row for row in built if "unknown_link" not in row]
    unknown = [row for row in built if "unknown_link" in row]
    others = Counter(row["left_out"] for row in rows if "left_out" in row)
    lists = "\n".join(f"- {why}: {count}" for why, count in others.most_common())
    return (
        f"{_estimates(known)}\n{_slow_lanes(built)}\n{_estimates(unknown)}\n"
        f"The others, by the reason against them:\n\n{lists}\n"
    )


def _torchtune(rows: Iterable[Mapping[str, Any]]) -> str:
    """Peak and speed of torchtune's own program, and of the recipes here that are most like it."""
    own = [row for row in rows if "measured_gib" in row]
    as_recipes = sorted(row["of_recipe"] for row in own if "of_recipe" in row)
    table = markdown_table(
        ("row", "measured, GiB", "emulated", "measured, tokens/s", "emulated", "error"),
        [
            (
                row["id"].rpartition("/")[2],
                f"{row['measured_gib']:.1f}",
                f"{row['peak_active_gib']:.1f}",
                f"{row['measured']:,.0f}",
                f"{row['estimated']:,.0f}",
                f"{row['error']:+.1%}",
            )
            for row in own
        ],
        range(1, 6),
    )
    peaks, speeds = (
        sorted(abs(row[ours] / row[theirs] - 1) for row in own)
        for ours, theirs in (("peak_active_gib", "measured_gib"), ("estimated", "measured"))
    )
    first, last = as_recipes[0], as_recipes[-1]
    said = (
        f"The peaks are off by {statistics.median(peaks):.1%} in the median and {peaks[-1]:.1%} at most, the "
        f"speeds by {statistics.median(speeds):.1%} and {speeds[-1]:.1%}, with a later PyTorch. As recipes "
        f"of this project {len(as_recipes)} of these rows are {first:+.1%} to {last:+.1%} off: that is "
        "another program, without rotary positions in fp32, a factor on all gradients, and waiting for the "
        "loss after each step, and it counts every token of a row."
    )
    return f"{table}\n{textwrap.fill(said, 120)}\n"


def _images(rows: Sequence[Mapping[str, Any]]) -> str:
    """Images a second of ResNet-50, and how far off they are in all."""
    table = markdown_table(
        ("device", "precision", "images a step", "measured, images/s", "emulated", "error"),
        [
            (
                row["gpu"],
                "mixed, fp16" if row["mixed"] else "fp32",
                str(row["rows"]),
                f"{row['measured']:,.0f}",
                f"{row['estimated']:,.0f}",
                f"{row['error']:+.1%}",
            )
            for row in rows
        ],
        range(2, 6),
    )
    size = sorted(abs(row["error"]) for row in rows)
    median = f"{statistics.median(size):.1%}"
    return f"{table}\nMedian error of these {len(size)}: {median}; the largest is {size[-1]:.1%}.\n"


def _estimates(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each estimate, and how far off they are in all."""
    table = markdown_table(
        ("row", "device", "measured, tokens/s", "estimated", "from", "to", "error"),
        [
            (
                row["id"],
                row["gpu"],
                f"{row['measured']:,.0f}",
                f"{row['estimated']:,.0f}",
                f"{row['from']:,.0f}" if "from" in row else "-",
                f"{row['to']:,.0f}" if "to" in row else "-",
                f"{row['error']:+.1%}",
            )
            for row in rows
        ],
        range(2, 7),
    )
    size = sorted(abs(row["error"]) for row in rows)
    if not size:
        return table
    nine = size[min(len(size) - 1, int(0.9 * len(size)))]
    return (
        f"{table}\nMedian error of these {len(size)}: {statistics.median(size):.1%}; nine of ten are off by "
        f"at most {nine:.1%}, and the largest by {size[-1]:.1%}.\n"
    )


def pairs(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Two rows of one source, model, card, sharding and length that differ in what is trained: LoRA beside
    QLoRA, with the nearest number of rows in a micro batch, and full fine-tuning beside LoRA."""
    known = {row["id"]: row for row in rows if "estimated" in row}
    found = [(known[a], known[b]) for a, b in TORCHTUNE_PAIRS if a in known and b in known]
    cells = [(match, row) for name, row in known.items() if (match := FSDP_QLORA.fullmatch(name))]
    for match, row in cells:
        same = [
            (abs(int(other["rows"]) - int(match["rows"])), n)
            for n, (other, _) in enumerate(cells)
            if other["method"] == "LoRA" and all(other[name] == match[name] for name in SAME)
        ]
        if match["method"] == "QLoRA" and same:
            found.append((cells[min(same)[1]][1], row))
    return found


def _pairs(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many times as fast the second of a pair is: as it was measured, and as it is estimated."""
    table: list[tuple[str, ...]] = []
    errors: list[float] = []
    agree = 0
    for first, second in pairs(rows):
        measured, estimated = (second[name] / first[name] for name in ("measured", "estimated"))
        errors.append(abs(estimated / measured - 1))
        agree += (measured > 1) == (estimated > 1)
        short = second["id"].removeprefix("fsdp_qlora/").removeprefix("torchtune/opt-table/")
        other = first["id"].rpartition("/")[2] if "/b" not in first["id"] else first["id"].split("/", 3)[3]
        table.append(
            (short, other, second["gpu"], f"{measured:.2f}", f"{estimated:.2f}", f"{errors[-1]:.0%}")
        )
    columns = ("row", "beside", "device", "measured, times as fast", "estimated", "apart")
    said = (
        f"\nOf these {len(errors)} pairs {agree} have the same one as the faster; the ratios are "
        f"{statistics.median(errors):.1%} apart in the middle, and {max(errors):.0%} at most.\n"
    )
    return markdown_table(columns, table, range(3, 6)) + said


def main(*, check: bool) -> None:
    """Write the page, or compare it."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_or_check({PAGE: with_parts(PAGE, parts(found))}, "pages.time", check=check)


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
