"""Every kernel of a step on a real GPU beside its estimate.

    python -m benchmarks.time.on_hardware MEASURED ESTIMATED

Both folders hold traces of torch.profiler by recipe, as `python -m benchmarks.gpu_programme --part profile`
writes them: MEASURED on the GPU, ESTIMATED by the same command with the same libraries under
`harness emulate --gpu NAME`, where the virtual GPU's clock takes what harness/kernel_time says. The same code
launches the same operators in the same order, so that each has a partner; its kernels count together. Instead
of the folder MEASURED, a kernels.csv.gz holds estimates made anew against the medians that were measured.

Writes profiles/<gpu>/kernels.json, the errors by recipe and by kind of kernel, and kernels.csv.gz beside it:
each operator with its shapes, how often it ran, and its median time, measured and estimated.
"""

import csv
import gzip
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.command import parser_of
from harness.system.files import write_whole
from harness.system.locations import profiles_folder

LONG_US = 10.0
"""Errors are of operators that take so long: of shorter ones a launch is most."""
KINDS = {
    "optimizer": r"multi_tensor_apply|kOptimizer",
    "dequantize": r"kDequantize",
    "attention": r"cudnn.*(fprop|bprop|sdpa|flash)|flash_|fmha",
    "product": r"gemm|nvjet|cutlass|splitK|gemv|dot_kernel",
    "elementwise, side by side": r"vectorized_elementwise|Memcpy|Memset",
    "elementwise, of several dtypes": r"unrolled_elementwise",
    "elementwise, strided or broadcast": r"::elementwise_kernel|index_elementwise",
    "concatenation": r"CatArray",
    "reduction": r"reduce_kernel",
    "softmax": r"[sS]oft[mM]ax",
}
"""Kinds of kernels by a pattern of their names, the first that fits."""
COLUMNS = ("recipe", "operator", "sizes", "dtypes", "strides", "kind", "count", "measured_us", "estimated_us")


class Operator(NamedTuple):
    """One operator of a trace that launched kernels."""

    name: str
    sizes: str
    dtypes: str
    strides: str
    us: float
    """What its kernels took together."""
    kind: str
    """One of KINDS, or "other", by its last kernel."""

    @property
    def shapes(self) -> tuple[str, ...]:
        """What its partner has too."""
        return self[:4]


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, name in KINDS.items() if re.search(name, kernel)), "other")


def read_table(path: Path) -> dict[str, list[Operator]]:
    """The operators of a kernels.csv.gz by recipe, each as often as it ran."""
    found: dict[str, list[Operator]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            described = (row[name] for name in ("operator", "sizes", "dtypes", "strides"))
            operator = Operator(*described, float(row["measured_us"]), row["kind"])
            found[row["recipe"]] += [operator] * int(row["count"])
    return found


def read_operators(path: Path) -> list[Operator]:
    """The operators of a trace, in the order of their launch."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    called: dict[int, Any] = {}
    launched: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        identity = (event.get("args") or {}).get("External id")
        if identity is not None and event.get("cat") == "cpu_op":
            called[identity] = event
        elif identity is not None and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched[identity].append(event)
    found = []
    for event in sorted((called[key] for key in launched if key in called), key=lambda each: each["ts"]):
        given, kernels = event["args"], launched[event["args"]["External id"]]
        texts = (json.dumps(given.get(name)) for name in ("Input Dims", "Input type", "Input Strides"))
        kind = kind_of(kernels[-1]["name"])
        found.append(Operator(event["name"], *texts, sum(kernel["dur"] for kernel in kernels), kind))
    return found


def partners(measured: Iterable[Operator], estimated: Iterable[Operator]) -> Iterator[tuple[Operator, float]]:
    """Each measured operator with the estimated microseconds of its partner; none for one that has none."""
    waiting: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for operator in estimated:
        waiting[operator.shapes].append(operator.us)
    for queue in waiting.values():
        queue.reverse()
    for operator in measured:
        if waiting[operator.shapes]:
            yield operator, waiting[operator.shapes].pop()


def summary(pairs: Sequence[tuple[Operator, float]]) -> dict[str, Any]:
    """Milliseconds of all, and the median error of an operator that takes LONG_US and more."""
    errors = [abs(us / operator.us - 1) for operator, us in pairs if operator.us >= LONG_US]
    return {
        "operators": len(pairs),
        "measured_ms": round(sum(operator.us for operator, _ in pairs) / 1e3, 2),
        "estimated_ms": round(sum(us for _, us in pairs) / 1e3, 2),
        "long_operators": len(errors),
        "median_error": round(median(errors), 4) if errors else None,
    }


def rows(recipe: str, pairs: Sequence[tuple[Operator, float]]) -> Iterator[tuple[Any, ...]]:
    """The lines of kernels.csv.gz, see COLUMNS."""
    alike: dict[tuple[str, ...], list[tuple[Operator, float]]] = defaultdict(list)
    for operator, us in pairs:
        alike[operator.shapes].append((operator, us))
    for shapes, group in sorted(alike.items()):
        measured, estimated = median(o.us for o, _ in group), median(us for _, us in group)
        yield recipe, *shapes, group[0][0].kind, len(group), round(measured, 2), round(estimated, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = parser_of("benchmarks.time.on_hardware", __doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("estimated", type=Path)
    parser.add_argument("--gpu", default="h100", help="its name in the hardware table")
    options = parser.parse_args(arguments)
    if options.measured.is_dir():
        paths = sorted(options.measured.glob("*.json.gz"))
        measured = {path.name.removesuffix(".json.gz"): read_operators(path) for path in paths}
    else:
        measured = read_table(options.measured)
    pairs = {
        recipe: list(partners(operators, read_operators(options.estimated / f"{recipe}.json.gz")))
        for recipe, operators in measured.items()
    }
    every = [pair for each in pairs.values() for pair in each]
    by_kind: dict[str, list[tuple[Operator, float]]] = defaultdict(list)
    for pair in every:
        by_kind[pair[0].kind].append(pair)
    kinds = sorted(by_kind, key=lambda kind: -sum(operator.us for operator, _ in by_kind[kind]))
    document = {
        "recipes": {recipe: summary(each) for recipe, each in pairs.items()},
        "kinds": {kind: summary(by_kind[kind]) for kind in kinds},
        "all": summary(every),
    }
    folder = profiles_folder() / options.gpu
    write_whole(folder / "kernels.json", json.dumps(document, indent=1) + "\n")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for recipe, each in pairs.items():
        writer.writerows(rows(recipe, each))
    (folder / "kernels.csv.gz").write_bytes(gzip.compress(table.getvalue().encode(), 9, mtime=0))
    print(json.dumps(document["all"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
