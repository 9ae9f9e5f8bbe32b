"""Hold the estimates of time against published training runs: MPT models under FSDP, on 8 to 512 GPUs.

    python -m benchmarks.time.runs FILE.json [--every N] [--json]

FILE.json has `rows` with id, model, seq_len, gpus, gpu, batch_per_gpu, gradient_accumulation, precision,
sharding, gradient_checkpointing and tokens_per_s_per_gpu, and `shapes` with the hidden size, heads and layers
of each model. Each run is estimated (benchmarks/time/mpt_step.py) from its own settings, and printed with
the published rate; then the errors by GPU. --every N takes each Nth row. Nothing was fitted to such runs.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.time.mpt_step import Estimate, Run, Shape, Step
from benchmarks.time.residuals import spread
from harness.hardware.hardware import Hardware, find_hardware, hardware_names, with_cuda

GPUS = {
    "H100-80GB": "h100",
    "A100-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "H200-141GB": "h200",
    "A40-48GB": "a40",
}
SHAPES = {
    "mpt-125m": (768, 12, 12),
    "mpt-350m": (1024, 16, 24),
    "mpt-760m": (1536, 12, 24),
    "mpt-1b": (2048, 16, 24),
    "mpt-3b": (2560, 20, 32),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 56, 48),
    "mpt-70b": (8192, 64, 80),
}
"""Where a file has none."""
NODE_BYTES = {"a100": 1600e9 / 8, "h100": 3200e9 / 8}
"""Bytes/s between machines, of each machine, as the source states: 1600 and 3200 Gbit/s."""
FP8_SPEEDUP = 1.5
"""Of products in fp8 through Transformer Engine over 16 bit: twice the peak, less the casts. A guess; few
rows."""


def device_of(name: str) -> Hardware | None:
    """The device of the table that a row's GPU is, with the libraries of 2023, the year of the runs; None if
    there is none."""
    short = GPUS.get(name, name.lower())
    for known in (short, short.removesuffix("-80gb"), short.split("-")[0]):
        if known in hardware_names():
            return with_cuda(find_hardware(known), 12)
    return None


def run_of(row: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Run | None:
    """What a row ran; None for a model of unknown shape."""
    shape = shapes.get(row["model"]) or SHAPES.get(row["model"])
    if shape is None:
        return None
    node = next((rate for name, rate in NODE_BYTES.items() if row["gpu"].lower().startswith(name)), 200e9)
    return Run(
        Shape(*shape[:3]),
        int(row["seq_len"]),
        int(row["gpus"]),
        int(row["batch_per_gpu"]),
        int(row.get("gradient_accumulation") or 1),
        bool(row.get("gradient_checkpointing")),
        gathers_again=row.get("sharding", "FULL_SHARD") == "FULL_SHARD",
        network=node / 8,
        early_stop=str(row.get("precision", "")).startswith("amp"),  # the newer versions' name
        products_speedup=FP8_SPEEDUP if "fp8" in str(row.get("precision")) else 1.0,
    )


def estimated(row: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> tuple[Run, Estimate] | None:
    """The run of a row and its step; None where the device, the model or a number of it is not known."""
    try:
        hardware, run = device_of(row["gpu"]), run_of(row, shapes)
    except (KeyError, TypeError, ValueError):  # a number that the source does not give
        return None
    if hardware is None or run is None:
        return None
    return run, Step(run, hardware).estimate()


def compare(document: Mapping[str, Any], every: int = 1) -> list[dict[str, Any]]:
    """Each row with the measured and the estimated tokens a second and GPU, and the error."""
    shapes = document.get("shapes") or {}
    found = []
    for row in document["rows"][::every]:
        if not row.get("tokens_per_s_per_gpu"):
            continue
        made = estimated(row, shapes)
        about = {name: row.get(name) for name in ("id", "model", "gpu", "gpus", "seq_len", "precision")}
        about |= {"checkpointing": row.get("gradient_checkpointing")}
        if made is None:
            found.append(about | {"estimated": None, "measured": row["tokens_per_s_per_gpu"], "error": None})
            continue
        run, step = made
        tokens = run.rows * run.seq_len * run.micro_batches
        rate = tokens / step.seconds
        found.append(
            about
            | {
                "measured": row["tokens_per_s_per_gpu"],
                "estimated": round(rate, 1),
                "from": round(tokens / step.high_s, 1),
                "to": round(tokens / step.low_s, 1),
                "step_s": round(step.seconds, 5),
                "waits_s": round(step.waits_s, 5),
                "seconds_by_kind": {kind: round(each, 5) for kind, each in step.by_kind.items()},
                "error": round(rate / row["tokens_per_s_per_gpu"] - 1, 4),
            }
        )
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Errors by GPU: of tokens a second, without their sign; and their middle with it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["error"] is not None:
            for name in (row["gpu"], row["gpu"].split("-")[0], "all"):
                groups[name].append(row["error"])
    return [
        {"gpu": name, **spread(each), "middle": round(statistics.median(each), 4)}
        for name, each in sorted(groups.items())
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--json", action="store_true", dest="as_json")
    given = parser.parse_args(arguments)
    try:
        document = json.loads(given.file.read_text(encoding="utf-8"))
        rows = compare(document, max(1, given.every))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{given.file}: {error!r}. Name a JSON file with `rows` of published runs, and `shapes`.")
    found = summary(rows)
    if given.as_json:
        print(json.dumps({"rows": rows, "errors": found}, indent=1))
        return
    headings = f"{'run':22}{'model':10}{'GPU':11}{'GPUs':>5}{'length':>8}{'measured':>10}"
    print(headings + f"{'estimated':>11}{'from':>10}{'to':>10}{'error':>8}")
    for row in rows:
        line = f"{row['id']:22}{row['model']:10}{row['gpu']:11}{row['gpus']:5}{row['seq_len']:8}"
        line += f"{row['measured']:10,.0f}"
        if row["error"] is None:
            print(line + "  the device, the model or a number is not known")
            continue
        print(line + f"{row['estimated']:11,.0f}{row['from']:10,.0f}{row['to']:10,.0f}{row['error']:+8.1%}")
    print("\nerrors of tokens a second and GPU (middle: with their sign)")
    for each in found:
        print(
            f"{each['gpu']:12}{each['count']:5} runs  median {each['median']:.1%}  p90 {each['p90']:.1%}  "
            f"largest {each['max']:.1%}  middle {each['middle']:+.1%}"
        )


if __name__ == "__main__":
    main()
