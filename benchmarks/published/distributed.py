"""Peaks of several GPUs that others published: which of them say enough to be built, and why the others do not.

    python -m benchmarks.published.distributed ROWS     read the rows, write profiles/published/distributed.json

A row can be held against an answer if the engine is one of the harness's (DDP, FSDP2, tensor parallelism), the
step is made of toggles of a recipe, the rows have a known length, and what was measured is a peak of PyTorch's
allocator on one GPU. The first reason against it, in the order below, stands beside it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.published.cases import FOLDER
from harness.system.files import write_whole

RESULTS = FOLDER / "distributed.json"
KEPT = ("id", "source", "model", "method", "gpus", "gpu", "peak_memory", "unit", "memory_is")

REASONS: tuple[tuple[str, str, str], ...] = (
    ("memory", r"sum over|average|oom|card capacity", "no peak of one GPU: a sum, a mean, or out of memory"),
    (
        "method",
        r"\bpp\d|\bcp ?\d|sequence_parallel|\bep\d",
        "pipeline, context, sequence or expert parallelism",
    ),
    ("engine", r"zero|deepspeed|ds3|/ds", "DeepSpeed: `harness shard` has formulas for it, no engine"),
    ("engine", r"megatron|mfsdp|m-fsdp|dist_muon", "Megatron: another engine"),
    (
        "engine",
        r"fsdp1|fsdp_qlora|fsdp-qlora|fsdp-lora|fabric|qlora fsdp|per-param fsdp|multinode",
        "FSDP1, Fabric or unnamed: flat parameters and other streams (its NO_SHARD is no DDP)",
    ),
    ("method", r"float8|fp8|mxfp8|nvfp4|rowwise", "products in 8 bits or fewer"),
    ("method", r"compile", "compiled: the compiler chooses what is kept"),
    (
        "method",
        r"selective|per-op sac|toml default",
        "selective activation checkpointing: no toggle of a recipe",
    ),
    ("method", r"gpt-oss|cce|flex|8-bit base|dpo", "a loss, a kernel or an offload that no toggle is"),
    ("memory", r"nvidia-smi|rounded", "memory of the whole process, rounded, on rows of unknown lengths"),
    ("method", r"no ac", "torchtitan's own model of 2024: without checkpointing what it keeps decides"),
)
"""What is looked at, what is looked for, and the reason."""


def reason(row: dict[str, Any]) -> str:
    """Why a row cannot be built; empty if it can."""
    texts = {
        "memory": f"{row['memory_is']} {row['trust']} {row['method']}",
        "engine": f"{row['id']} {row['model']} {row['method']} {row['versions']}",
        "method": f"{row['id']} {row['method']}",
    }
    for what, pattern, why in REASONS:
        if re.search(pattern, texts[what].lower()):
            return why
    if None in (row["batch_per_gpu"], row["seq_len"], row["gpus"]):
        return "batch, sequence or number of GPUs not stated"
    return ""


def main(path: Path) -> None:
    """Write the rows with their reasons, and print how many have each."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = [{name: row[name] for name in KEPT} | {"left_out": reason(row)} for row in rows]
    counts = Counter(row["left_out"] or "can be built" for row in found)
    write_whole(RESULTS, json.dumps({"counts": dict(counts.most_common()), "rows": found}, indent=1) + "\n")
    for why, count in counts.most_common():
        print(f"{count:4} {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
