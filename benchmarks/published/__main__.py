"""Peaks that others published, against napkin and simulate: profiles/published/results.json and README.md.

    python -m benchmarks.published SOURCES      compute every row (two minutes), write both files
    python -m benchmarks.published --napkin     ask the napkin again, and write both files
    python -m benchmarks.published              write README.md from results.json

SOURCES is a folder with the code that was measured, as FETCH below makes it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.published import kernels, litgpt, napkin
from benchmarks.published.cases import FOLDER, device_of, published_cases
from harness.hardware.hardware import Hardware, find_hardware
from harness.napkin.prediction import predict
from harness.recipe.check import check_recipe
from harness.system.files import write_whole
from harness.system.versions import provenance
from pages.profiles.published import readme

LIGERS = ("0.2.1", "0.4.2")
FETCH = f"""\
git clone https://github.com/Lightning-AI/litgpt SOURCES/litgpt
git -C SOURCES/litgpt checkout {litgpt.COMMIT}
""" + "\n".join(
    # without the second command a newer Liger, which is a package and no namespace, goes before
    f"pip install --no-deps --target SOURCES/liger-kernel-{v} liger-kernel=={v}\n"
    f"touch SOURCES/liger-kernel-{v}/liger_kernel/__init__.py"
    for v in LIGERS
)
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
NOT_GIVEN = (
    "the source names neither the GPU nor the versions of torch, transformers, peft and bitsandbytes, "
    "and the step has no loss and no optimizer"
)
OTHER_CODE = "torchtune's own model, loss and packing; versions not pinned by the source"
KEPT_INPUTS = (
    "bitsandbytes before 0.43.2 keeps the input of every 4-bit product (ended by its #1270); "
    "napkin prices today's"
)
LEFT_OUT = {"fsdp_qlora-nb": NOT_GIVEN, "torchtune": OTHER_CODE}
"""Sources that no answer can be held against, and why."""
Answer = tuple[int | None, str]
"""Bytes, or why there are none; no bytes and no reason: out of memory."""


def rows(sources: Path) -> list[dict[str, Any]]:
    """Every case with what was measured and both answers, in the order of the file."""
    liger = {name: size for wanted in LIGERS for name, size in _of_liger(sources, wanted).items()}
    return [_row(case, sources, liger) for case in published_cases()]


def _row(case: dict[str, Any], sources: Path, liger: dict[str, int]) -> dict[str, Any]:
    hardware = device_of(case)
    napkin, simulated = napkin_answer(case, hardware), _simulated_answer(case, hardware, sources, liger)
    return {
        "id": case["id"],
        "source": case["source"],
        "measured_bytes": measured_bytes(case),
        "out_of_memory": case.get("status") == "OOM",
        "capacity_bytes": hardware.memory_bytes,
        "napkin_bytes": napkin[0],
        "napkin_left_out": napkin[1],
        "simulated_bytes": simulated[0],
        "simulated_left_out": simulated[1],
    }


def measured_bytes(case: dict[str, Any]) -> int | None:
    """The peak that was measured; None where it ran out of memory, or where no peak was published."""
    for name, value in case["measured"].items():
        if name.startswith("peak_") and value is not None:
            return round(value * UNITS[name.rpartition("_")[2]])
    return None


def napkin_answer(case: dict[str, Any], hardware: Hardware) -> Answer:
    """Napkin's peak for a case, or why it has none."""
    source = case["id"].split("/")[0]
    if source in LEFT_OUT:
        return None, LEFT_OUT[source]
    if source == "liger-kernel":
        return None, "a kernel by itself: the napkin is about a model's step"
    if case["method"] != "lora":
        return None, "LLaMA-Adapter: no toggle of a recipe"
    if case["quantization"]:
        return None, KEPT_INPUTS
    if case["model"] not in napkin.LITGPT_MODELS:
        return None, "Falcon-40B: benchmarks/published/models has no config of it"
    return napkin.training_run(case, hardware), ""


def _simulated_answer(
    case: dict[str, Any], hardware: Hardware, sources: Path, liger: dict[str, int]
) -> Answer:
    source, _, provider, *_ = case["id"].split("/")
    if source in LEFT_OUT:
        return None, LEFT_OUT[source]
    if source == "liger-kernel":
        own = provider == "liger"
        return (liger[case["id"]] if own else kernels.allocated_row(case, hardware)), ""
    return litgpt.allocated_row(sources / "litgpt", case, hardware), ""


def _of_liger(sources: Path, wanted: str) -> dict[str, int]:
    """Liger's own rows, in a process that finds the Liger of their day."""
    environment = {**os.environ, "PYTHONPATH": f"{sources / f'liger-kernel-{wanted}'}{os.pathsep}."}
    command = [sys.executable, "-m", "benchmarks.published.__main__.kernels", wanted]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    """See the module's docstring."""
    results = FOLDER / "results.json"
    if sys.argv[1:] == ["--napkin"]:
        found = json.loads(results.read_bytes())
        for row, case in zip(found["rows"], published_cases(), strict=True):
            row["napkin_bytes"], row["napkin_left_out"] = napkin_answer(case, device_of(case))
        write_whole(results, json.dumps(found, indent=1) + "\n")
        several = json.loads((FOLDER / "distributed.json").read_bytes())
        for row in several["rows"]:
            if "napkin_bytes" in row and "recipe" in row["made_of"]:
                recipe = check_recipe(row["made_of"]["recipe"], row["id"])
                peak = predict(recipe, find_hardware(row["made_of"]["gpu"])).memory
                row["napkin_bytes"] = peak.peak_allocated_bytes
        write_whole(FOLDER / "distributed.json", json.dumps(several, indent=1) + "\n")
    elif len(sys.argv) > 1:
        sources = Path(sys.argv[1])
        missing = [
            n for n in ("litgpt", *(f"liger-kernel-{v}" for v in LIGERS)) if not (sources / n).is_dir()
        ]
        if missing:
            sys.exit(f"{sources} lacks {', '.join(missing)}. These commands make it:\n{FETCH}")
        found = {"provenance": provenance(), "rows": rows(sources)}
        write_whole(results, json.dumps(found, indent=1) + "\n")
    names = ("results", "distributed", "emulated", "fsdp1")
    found = [json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    write_whole(FOLDER / "README.md", readme(*found))


if __name__ == "__main__":
    main()
