"""Peaks of several GPUs that others published: those that can be built, simulated, and why the others cannot.

    python -m benchmarks.published.distributed ROWS SOURCES

writes profiles/published/distributed.json, after each row; what is there of the same recipe and the same
libraries is kept. SOURCES is a folder with torchtitan at two commits, as FETCH below makes it.

A row can be held against an answer if its step is a recipe's or torchtitan's own (titan.py), divided by
FSDP2, DDP or FSDP1 with the same units, its rows have a known length, and what was measured is a peak on one
GPU. The first reason against it, in the order below, stands beside it.
"""

import json
import re
import sys
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published import titan
from benchmarks.published.cases import FOLDER
from benchmarks.published.equivalents import GPUS, measured_process, recipe_fields, why_off
from harness.errors import InputError
from harness.hardware.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.napkin.prediction import predict
from harness.recipe.check import check_recipe
from harness.recipe.recipe import Recipe
from harness.simulate.simulated_run import simulate
from harness.system.files import write_whole
from harness.system.versions import provenance

RESULTS = FOLDER / "distributed.json"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
FETCH = "\n".join(
    f"git clone https://github.com/pytorch/torchtitan SOURCES/{name}\ngit -C SOURCES/{name} checkout {commit}"
    for name, commit in titan.COMMITS.items()
)
KEPT = (
    "id",
    "source",
    "model",
    "method",
    "gpus",
    "gpu",
    "peak_memory",
    "unit",
    "memory_is",
    "peak_allocated_gib",
)
"""The last is of few rows."""

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
        r"fsdp1|fabric|qlora fsdp|per-param fsdp|multinode",
        "FSDP1, Fabric or unnamed, on batches or lengths that are not stated",
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


ANSWER = ("napkin_bytes", "simulated_bytes", "simulated_reserved_bytes", "compared_bytes", "fits")
UNTOLD = "untold_bytes"
"""What is compared, with what a source may have changed without a word; not every row has it."""
LATER = "it can be built, and the command has not come to it yet"
OFF = 0.03
"""Beyond this a row says why."""


def measured_bytes(row: dict[str, Any]) -> int:
    """The peak that was published."""
    return round(float(row["peak_memory"]) * UNITS[row["unit"].split()[0]])


def of_recipe(row: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Napkin's peak and the simulated ones of a row's equivalent, in bytes."""
    gpu = GPUS[row["gpu"]]
    recipe = check_recipe(fields, row["id"])
    try:
        napkin = predict(recipe, find_hardware(gpu)).memory.peak_allocated_bytes
    except InputError:
        napkin = None
    memory, fits = _simulated(recipe, gpu)
    return {
        "napkin_bytes": napkin,
        "simulated_bytes": memory.peak_allocated_bytes,
        "simulated_reserved_bytes": memory.peak_reserved_bytes,
        "compared_bytes": memory.process_bytes if measured_process(row) else memory.peak_reserved_bytes,
        "fits": fits,
    }


@cache
def _simulated(recipe: Recipe, gpu: str) -> tuple[Any, bool]:
    """Memory of the recipe, and whether that fits: a card that is nearly full gives cached memory back."""
    hardware = find_hardware(gpu)
    profile, _ = simulate(recipe, hardware, explain_oom=False)
    if profile.oom is None:
        return profile.memory, True
    return simulate(recipe, with_memory(hardware, PLENTY_BYTES), explain_oom=False)[0].memory, False


def of_titan(row: dict[str, Any], sources: Path) -> dict[str, Any]:
    """The simulated peaks of torchtitan's own step, in bytes."""
    run, first_step = titan.RUNS[row["id"]]

    def compared(run: titan.Run) -> tuple[titan.Peaks, int]:
        peaks = titan.peaks(sources / run.checkout, run, "h100")
        return peaks, peaks.first_reserved if first_step else peaks.reserved

    peaks, compared_bytes = compared(run)
    untold = titan.untold(run)
    return {
        "napkin_bytes": None,
        "simulated_bytes": peaks.allocated,
        "simulated_reserved_bytes": peaks.reserved,
        "compared_bytes": compared_bytes,
        "fits": True,
    } | ({} if untold is None else {UNTOLD: compared(untold)[1]})


def held_against(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What the answer is compared with, the error, and why it is large."""
    error = answer["compared_bytes"] / measured_bytes(row) - 1
    if UNTOLD in answer:
        because = f"{titan.NOT_TOLD} {answer[UNTOLD] / measured_bytes(row) - 1:+.1%}"
    else:
        because = "cause not found" if row["id"] in titan.RUNS else why_off(row)
    if not answer["fits"]:
        because += "; on the card itself the simulation runs out of memory"
    return answer | {
        "measured_bytes": measured_bytes(row),
        "error": round(error, 4),
        "off_because": because if abs(error) > OFF else "",
        "left_out": "",
    }


def main(path: Path, sources: Path) -> None:
    """Write the rows with their answers or reasons, and print how many have each."""
    missing = [name for name in titan.COMMITS if not (sources / name).is_dir()]
    if missing:
        sys.exit(f"{sources} lacks {', '.join(missing)}. These commands make it:\n{FETCH}")
    versions = {name: provenance()["versions"].get(name) for name in LIBRARIES}
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    simulated = [row for row in before.get("rows", []) if "error" in row]
    if before.get("versions") != versions:
        simulated = []
    known = {row["id"]: row for row in simulated}
    same = {json.dumps(row["made_of"]): row for row in simulated if "recipe" in row["made_of"]}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found: dict[str, dict[str, Any]] = {}
    wanted: list[dict[str, Any]] = []
    for row in rows:
        fields = None if isinstance(row["peak_memory"], str) else recipe_fields(row)
        made_of = {"gpu": GPUS[row["gpu"]], "recipe": fields} if fields else titan.told(row["id"])
        kept = {name: row[name] for name in KEPT if name in row} | ({"made_of": made_of} if made_of else {})
        kept = json.loads(json.dumps(kept))
        there = known.get(row["id"]) or same.get(json.dumps(kept.get("made_of")), {})
        if not made_of:
            found[row["id"]] = kept | {"left_out": reason(row)}
        elif "error" in there and there.get("made_of") == kept["made_of"]:
            answer = {name: there[name] for name in (*ANSWER, UNTOLD) if name in there}
            found[row["id"]] = kept | held_against(row, answer)
        else:
            found[row["id"]] = kept | {"left_out": LATER}
            wanted.append(row)
    for row in [None, *wanted]:
        if row is not None:
            fields = recipe_fields(row)
            answer = of_recipe(row, fields) if fields else of_titan(row, sources)
            found[row["id"]] |= held_against(row, answer)
            print(row["id"], f"{found[row['id']]['error']:+.1%}", flush=True)
        there = [found[each["id"]] for each in rows]
        counts = Counter(each["left_out"] or "built" for each in there)
        written = {"versions": versions, "counts": dict(counts.most_common()), "rows": there}
        write_whole(RESULTS, json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
