"""Peaks of several GPUs that others published: which of them can be built, and why the others cannot.

    python -m benchmarks.published.distributed ROWS     compute, write profiles/published/distributed.json

A row can be held against an answer if the engine is one of the harness's (DDP, FSDP2, tensor parallelism),
the step is made of toggles of a recipe, its rows have a known length, and what was measured is a peak of
PyTorch's allocator on one GPU. The first reason against it, in the order below, stands beside it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.published.cases import FOLDER
from harness.hardware.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.napkin.prediction import predict
from harness.recipe.check import check_recipe
from harness.simulate.simulated_run import simulate
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


LLAMA_3_8B = {
    "model": "llama-3.1-8b",
    "precision": "bf16-mixed",
    "reduce_dtype": "fp32",
    "parallel": "fsdp",
    "dp_shard": 8,
    "seq_len": 8192,
    "max_grad_norm": 1.0,
}
"""torchtitan's debug of FSDP2 in June 2024: fp32 parts gathered in bf16, AdamW, no checkpointing."""
OF_ITS_DAY = "torchtitan's blocks and FSDP2 of June 2024, before the row's own change, are not built here"
BUILT = {
    "pt/132445": (LLAMA_3_8B, False, OF_ITS_DAY),
    "pt/129721": (LLAMA_3_8B, True, f"{OF_ITS_DAY}; after it the source has 69.46 GiB"),
}
"""By id: the recipe, whether the first step was measured, and why an answer is off by more than 3 %."""


def answers(fields: dict[str, Any], first_step: bool) -> dict[str, int | None]:
    """Napkin's peak, allocated; the simulated one, allocated and reserved (of a steady step only)."""
    recipe = check_recipe(fields, "published row")
    device = with_memory(find_hardware("h100"), PLENTY_BYTES)
    napkin, simulated = predict(recipe, device).memory, simulate(recipe, device)[0].memory
    if first_step:
        both = napkin.first_step_peak_allocated_bytes, simulated.first_step_peak_allocated_bytes
        return {"napkin_bytes": both[0], "simulated_bytes": both[1], "simulated_reserved_bytes": None}
    return {
        "napkin_bytes": napkin.peak_allocated_bytes,
        "simulated_bytes": simulated.peak_allocated_bytes,
        "simulated_reserved_bytes": simulated.peak_reserved_bytes,
    }


def main(path: Path) -> None:
    """Write the rows with their answers or reasons, and print how many have each."""
    found = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        kept = {name: row[name] for name in KEPT}
        if row["id"] in BUILT:
            fields, first_step, why = BUILT[row["id"]]
            found.append(kept | answers(fields, first_step) | {"off_because": why, "left_out": ""})
        else:
            found.append(kept | {"left_out": reason(row)})
    counts = Counter(row["left_out"] or "built" for row in found)
    write_whole(RESULTS, json.dumps({"counts": dict(counts.most_common()), "rows": found}, indent=1) + "\n")
    for why, count in counts.most_common():
        print(f"{count:4} {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
