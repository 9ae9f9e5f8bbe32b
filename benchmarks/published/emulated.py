"""Published peaks on virtual GPUs: profiles/published/emulated.json, some rows that differ in kind.

    python -m benchmarks.published.emulated SOURCES [ROW ...]

SOURCES is a folder as `python -m benchmarks.published` takes it. It needs PyTorch's CUDA build and no GPU:
the code that was measured runs on PyTorch's own operators and allocator, each row in a process that has had
no other. Rows that are there already, of the same versions, are not made again.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.published import kernels, litgpt
from benchmarks.published.cases import FOLDER, device_of, published_cases
from benchmarks.published.device import AS_THEN
from harness.system.files import write_whole
from harness.system.versions import provenance
from harness.virtual_gpu import Options, emulated_device, surroundings

ROWS = (
    "litgpt-res/phi-1.5/lora/None/mb1",
    "litgpt-res/phi-1.5/lora/bnb.nf4/mb1",
    "litgpt-res/StableLM-base-alpha-3b/adapter/bnb.nf4/mb1",
    "litgpt-res/StableLM-base-alpha-3b/adapter_v2/bnb.nf4/mb1",
    "litgpt-res/Llama-2-7B/lora/None/mb2",
    "litgpt-res/Llama-2-7B/lora/None/mb4",
    "litgpt-res/Llama-2-7B/lora/bnb.nf4-dq/mb1",
    "litgpt-res/Llama-2-13B/lora/None/mb1",
    "liger-kernel/cross_entropy/huggingface/V=131072",
    "liger-kernel/fused_linear_cross_entropy/huggingface/BT=32768",
    "liger-kernel/fused_linear_cross_entropy/liger/BT=4096",
    "liger-kernel/geglu/huggingface/T=8192",
    "liger-kernel/rms_norm/liger/H=8192",
    "liger-kernel/rope/huggingface/T=16384",
    "liger-kernel/swiglu/liger/T=8192",
)
RESULTS = FOLDER / "emulated.json"


def on_virtual_gpus(sources: Path, names: list[str]) -> list[dict[str, Any]]:
    """The rows called `names`, in groups that have the device and the Liger of their measurement."""
    cases = {_name(case): case for case in published_cases()}
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        own = name.split("/")[2] == "liger"
        groups[device_of(cases[name]).name, cases[name]["versions"]["liger"] if own else ""].append(name)
    found = []
    for (gpu, liger), group in groups.items():
        environment = surroundings(Options(gpu), os.environ) | AS_THEN
        paths = [str(sources / f"liger-kernel-{liger}")] if liger else []
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], *paths, os.getcwd()])
        command = [sys.executable, "-m", "benchmarks.published.emulated", str(sources), *group]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found += [json.loads(line) for line in done.stdout.splitlines()]
    return found


def print_here(sources: Path, names: list[str]) -> None:
    """In a process on a virtual GPU: a line of JSON for each row."""
    for case in published_cases():
        if _name(case) in names:
            with get_context("fork").Pool(1) as process:
                peak = process.apply(_allocated, (case, sources))
            print(json.dumps({"id": _name(case), "emulated_bytes": peak}), flush=True)


def _name(case: dict[str, Any]) -> str:
    """Its id, without the sizes that some have as JSON at the end."""
    return case["id"].partition("/{")[0]


def _allocated(case: dict[str, Any], sources: Path) -> int | None:
    if case["id"].startswith("litgpt"):
        return litgpt.allocated_row(sources / "litgpt", case, device_of(case))
    return kernels.allocated_row(case, device_of(case))


def main() -> None:
    """See the module's docstring."""
    sources, names = Path(sys.argv[1]), sys.argv[2:] or list(ROWS)
    if emulated_device():
        print_here(sources, names)
        return
    made = {"provenance": provenance(), "rows": []}
    if RESULTS.exists():
        before = json.loads(RESULTS.read_bytes())
        if before["provenance"]["versions"] == made["provenance"]["versions"]:
            made["rows"] = [row for row in before["rows"] if row["id"] in ROWS]
    there = {row["id"] for row in made["rows"]}
    made["rows"] += on_virtual_gpus(sources, [name for name in names if name not in there])
    made["rows"].sort(key=lambda row: ROWS.index(row["id"]))
    write_whole(RESULTS, json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
