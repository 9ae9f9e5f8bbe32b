"""One rank of eight, simulated against emulated: full, LoRA and QLoRA by FSDP2, DDP and tensor parallelism,
with checkpointing and without, gradients summed after each micro batch or once a step.

    python -m benchmarks.virtual_gpu.ranks [CELL ...] [--out FILE] [--traces DIR]

Takes PyTorch's CUDA build and no GPU. Each cell is a small but real model (layers of Llama-3.2-1B), whose
rank 0 runs alone on a virtual GPU, every action of its allocator recorded; its recipe is simulated with the
same libraries. PyTorch runs without NCCL's watchdog (TORCH_NCCL_BLOCKING_WAIT=1), whose 100 ms would decide
how long DDP's first bucket stays. `--traces` keeps the recordings; some are in tests/recordings/virtual_gpu.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import GrowingTable, parser_of
from benchmarks.gpu_programme.import_results import sanitised_trace
from benchmarks.gpu_programme.recipes import Spec, with_layers
from benchmarks.gpu_programme.trace_file import load_trace
from benchmarks.traces import compared, hardware_of
from harness.errors import InputError
from harness.hardware import find_hardware
from harness.napkin import predict
from harness.system import quiet_libraries

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
RANKS, GPU = 8, "h200"
SIZES: dict[str, Any] = {"model": "llama-3.2-1b", "micro_batch_size": 2, "seq_len": 512, "precision": "bf16"}
LAYERS = 3
LORA: dict[str, Any] = {"adapter": "lora", "learning_rate": 2e-4, "adapter_dtype": "base"}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {"max_grad_norm": 1.0},
    "lora": LORA,
    "qlora": LORA | {"quantization": "nf4", "double_quant": True},
}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": "fsdp", "dp_shard": RANKS},
    "ddp": {"parallel": "ddp", "dp_replicate": RANKS},
    "tp": {"parallel": "tp", "tp": RANKS},
}
KEPT: dict[str, dict[str, Any]] = {"": {}, "-checkpointing": {"gradient_checkpointing": True}}
SUMMED: dict[str, dict[str, Any]] = {
    "": {"gradient_accumulation_steps": 2},
    "-once": {"gradient_accumulation_steps": 2, "sync_each_micro_batch": False},
}
_MIXED: dict[str, Any] = {"precision": "bf16-mixed", "reduce_dtype": "fp32", "gradient_checkpointing": True}
UNTIED: dict[str, Any] = {"model": "llama-3.1-8b", "gradient_checkpointing": True}
"""Layers of a model whose embeddings and head are two weights."""
OTHERS: dict[str, dict[str, Any]] = {
    "fsdp-full-mixed": ENGINES["fsdp"] | _MIXED | {"max_grad_norm": 1.0},
    "fsdp-full-fp16": ENGINES["fsdp"] | {"precision": "fp16-mixed", "reduce_dtype": "fp32"},
    "fsdp-full-kept": ENGINES["fsdp"] | {"reshard_after_forward": False},
    "fsdp-full-accelerate": ENGINES["fsdp"] | {"wrap": "accelerate", "gradient_checkpointing": True},
    "fsdp-full-hybrid": {"parallel": "fsdp", "dp_shard": 4, "dp_replicate": 2} | _MIXED,
    "fsdp-full-host": ENGINES["fsdp"] | {"cpu_offload": True},
    "fsdp-qlora-host": ENGINES["fsdp"]
    | TRAINED["qlora"]
    | {"cpu_offload": True, "gradient_checkpointing": True},
    "fsdp+tp-full": {"parallel": "fsdp+tp", "dp_shard": 2, "tp": 4, "gradient_checkpointing": True},
    "fsdp+tp-full-untied": {"parallel": "fsdp+tp", "dp_shard": 2, "tp": 4} | UNTIED,
    "tp-full-untied": ENGINES["tp"] | UNTIED,
    "ddp-full-mixed": ENGINES["ddp"] | {"precision": "bf16-mixed", "gradient_checkpointing": True},
}
WHOLE: dict[str, dict[str, Any]] = {
    "llama-3.1-8b-fsdp-full": ENGINES["fsdp"] | _MIXED | {"model": "llama-3.1-8b", "max_grad_norm": 1.0}
}
"""With all their layers."""


def cells() -> dict[str, Spec]:
    """By name: engine, what is trained, and what is kept and summed when."""
    found = dict(OTHERS)
    for engine, trained, kept, summed in product(ENGINES, TRAINED, KEPT, SUMMED):
        if engine != "tp" or (trained != "qlora" and not summed):  # such recipes are refused
            fields = ENGINES[engine] | TRAINED[trained] | KEPT[kept] | SUMMED[summed]
            found[f"{engine}-{trained}{kept}{summed}"] = fields
    cut = {name: Spec(f"ranks-{name}", None, SIZES | fields, layers=LAYERS) for name, fields in found.items()}
    return cut | {name: Spec(f"ranks-{name}", None, SIZES | fields) for name, fields in WHOLE.items()}


def record_here(name: str, path: Path) -> None:
    """On the virtual GPU, as rank 0 alone: three steps of a cell, recorded to `path`."""
    from types import SimpleNamespace

    import torch.testing._internal.distributed.fake_pg
    from torch import distributed

    from benchmarks.gpu_programme.traces import record

    torch.cuda.set_device(0)
    distributed.init_process_group("cpu:fake,cuda:nccl")
    result = record(SimpleNamespace(device="cuda:0", tiny=False), cells()[name])  # type: ignore[arg-type]
    path.write_bytes(sanitised_trace(result["trace"], name))
    distributed.destroy_process_group()


def row(name: str, path: Path) -> dict[str, Any]:
    """Peaks of a cell by both ways, in bytes; or the sentence that says why there are none."""
    command = [sys.executable, "-m", "harness", "emulate", "--gpu", GPU, "--world-size", str(RANKS)]
    command += ["--", sys.executable, "-m", "benchmarks.virtual_gpu.ranks", name, "--record", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"cell": name, "impossible": (done.stderr.strip().splitlines() or ["?"])[-1]}
    trace = load_trace(path)
    result = compared(trace, hardware_of(trace))
    peaks = result.peaks()
    found: dict[str, Any] = {"cell": name, "same_requests": result.same_requests}
    for what, (emulated, simulated) in peaks.items():
        found[what] = {"emulated": emulated, "simulated": simulated}
    return found


def with_napkin(found: dict[str, Any]) -> dict[str, Any]:
    """A row with what the napkin says of its allocated bytes: it is quick, and asked each time."""
    if "allocated" in found:
        spec = cells()[found["cell"]]
        with tempfile.TemporaryDirectory() as folder:
            recipe = with_layers(spec.recipe(), spec.layers, Path(folder))
            found["allocated"]["napkin"] = predict(recipe, find_hardware(GPU)).memory.peak_allocated_bytes
    return found


def main() -> int:
    """Exit status: 1 if a cell has not both answers."""
    parser = parser_of("benchmarks.virtual_gpu.ranks", __doc__)
    parser.add_argument("cell", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.cell) - cells().keys()
    if unknown:
        raise InputError(f"there is no cell {', '.join(sorted(unknown))}. There are: {', '.join(cells())}.")
    if options.record is not None:
        record_here(options.cell[0], options.record)
        return 0
    quiet_libraries()
    os.environ[BLOCKING_WAIT] = "1"
    head = {"torch": torch.__version__, "ranks": RANKS, "gpu": GPU}
    order = list(cells())
    table = GrowingTable(
        options.out, head, itemgetter("cell"), same=("torch",), order=lambda each: order.index(each["cell"])
    )
    table.rows = {name: with_napkin(each) for name, each in table.rows.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.cell or cells():
            found = row(name, folder / f"ranks-{name}.json.gz")
            print(json.dumps(found), flush=True)
            table.add(with_napkin(found))
    return int(any("impossible" in found for found in table.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
