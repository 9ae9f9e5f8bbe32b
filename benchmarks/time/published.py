"""The tables of the guide's page "Where the time goes": estimates of time beside what others measured.

    python -m benchmarks.time.published COMPUTE NETWORK THROUGHPUT MEASUREMENTS DISTRIBUTED
    python -m benchmarks.time.published [--check]

The first writes profiles/published/time.json from files of published measurements, and then the page; the
second writes the page from that file, or compares. Kernels: benchmarks/time/kernels.py, those of a step:
benchmarks/time/step_kernels.py. Runs of MPT models: benchmarks/time/runs.py. torchtune's own program:
benchmarks/time/torchtune.py. The others with tokens a second are simulated as the recipes that they are,
where one says what they ran; the reason against each of the others stands beside it.
"""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.distributed import reason
from benchmarks.published.equivalents import recipe_fields
from benchmarks.time.aiconfigurator import UNFITTED
from benchmarks.time.fit import ATTENTION, OTHER_DEVICES
from benchmarks.time.fit_shapes import formula_s, rows_aside
from benchmarks.time.kernel_rows import KernelRow, read_rows
from benchmarks.time.kernels import errors, of_two_layers
from benchmarks.time.runs import compare, summary
from benchmarks.time.step_kernels import step_kernels
from benchmarks.time.torchtune import OUT as EMULATED
from harness.errors import InputError
from harness.hardware.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.napkin.prediction import predict
from harness.recipe.check import check_recipe
from harness.simulate.simulated_run import simulate
from harness.system.files import write_whole
from harness.system.versions import provenance
from pages.time import RESULTS
from pages.time import main as write_page

GPUS = {"RTX 3090": "rtx-3090", "RTX 4090": "rtx-4090"}
UNKNOWN_LINKS = ("RTX 3090",)
"""GPUs of fsdp_qlora's rows whose machine has "an older motherboard and slow PCI lanes", of which it says no
number (benchmarks_03_2024.md in AnswerDotAI/fsdp_qlora): how fast they are, no datasheet tells."""
TORCHTUNE: dict[str, Any] = {
    "model": "llama-3.2-3b",
    "precision": "bf16",
    "micro_batch_size": 2,
    "seq_len": 4096,
    "attention": "flex_attention",
    "packing": True,
    "optimizer_impl": "fused",
}
"""torchtune's recipes for Llama 3.2 3B as recipes of this project. Each row of its table adds one more.
Packed rows have flex attention (torchtune/modules/attention_utils.py)."""
TORCHTUNE_LORA: dict[str, Any] = {
    "compile": True,
    "adapter": "lora",
    "adapter_dtype": "base",
    "lora_rank": 64,
    "lora_alpha": 128,
    "lora_targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gradient_checkpointing": True,
}
"""Its recipes/configs/llama3_2/3B_lora_single_device.yaml, in bf16 whole."""
TORCHTUNE_ROWS: dict[str, dict[str, Any] | str] = {
    "baseline (not packed)": "rows of alpaca that are not packed: of unknown lengths, most of them short",
    "+packed dataset": {},
    "+compile": {"compile": True},
    "+activation checkpointing": {"compile": True, "gradient_checkpointing": True},
    "+fuse optimizer step into backward": {
        "compile": True,
        "gradient_checkpointing": True,
        "optimizer_in_backward": True,
        "max_grad_norm": None,
    },
    "+8-bit AdamW": "which 8-bit AdamW it is, torchtune does not say",
    "LoRA": TORCHTUNE_LORA,
    "QLoRA": {**TORCHTUNE_LORA, "quantization": "nf4", "double_quant": True},
}


def of_recipes(measurements: Path, distributed: Path) -> list[dict[str, Any]]:
    """Rows with tokens a second that are no MPT run: measured and estimated, or why not.

    torchtune's rows are what its own program takes on the virtual GPU (benchmarks/time/torchtune.py)."""
    found = []
    emulated = {row["id"]: row for row in json.loads(EMULATED.read_text(encoding="utf-8"))["rows"]}
    for case in json.loads(measurements.read_text(encoding="utf-8"))["cases"]:
        if "tokens_per_s" not in case["measured"]:
            continue
        fields = TORCHTUNE_ROWS.get(case.get("cumulative", ""), "no recipe says what it ran")
        row = {"id": case["id"], "gpu": "a100-80gb", "measured": case["measured"]["tokens_per_s"]}
        of_recipe = _estimated(fields, TORCHTUNE, "a100-80gb")
        own = emulated.get(case["id"], {})
        if own and "estimated" in of_recipe:
            row["of_recipe"] = round(of_recipe["estimated"] / row["measured"] - 1, 4)
        found.append(row | (own or of_recipe))
    for case in json.loads(distributed.read_text(encoding="utf-8"))["rows"]:
        if not case.get("tokens_per_s"):
            continue
        fields = recipe_fields(case)
        gpu = GPUS.get(case["gpu"])
        why = reason(case) or "no recipe says what it ran"
        row = {"id": case["id"], "gpu": gpu or case["gpu"], "measured": case["tokens_per_s"]}
        known: dict[str, Any] | str = fields if fields and gpu else why
        if fields and case["gpu"] in UNKNOWN_LINKS and fields.get("parallel") == "fsdp":
            row["unknown_link"] = True
        found.append(row | _estimated(known, {}, gpu or ""))
    return found


def _estimated(fields: dict[str, Any] | str, base: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    if isinstance(fields, str):
        return {"left_out": fields}
    recipe = check_recipe({**base, **fields}, "published")
    hardware = with_memory(find_hardware(gpu), PLENTY_BYTES)
    try:
        profile = (
            predict(recipe, hardware) if recipe.compile else simulate(recipe, hardware, explain_oom=False)[0]
        )
    except InputError as error:
        return {"left_out": str(error)}
    step = profile.step.time_s
    tokens = (profile.step.tokens_per_s or 0.0) * (step.median or 0.0)
    ends = {name: round(tokens / end, 1) for name, end in (("from", step.p90), ("to", step.p10)) if end}
    return {"estimated": round(profile.step.tokens_per_s or 0.0, 1), "by": profile.source, **ends}


def of_new_shapes(rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    """How far off products are where the measurements of their shape are left out of the estimate."""
    found = errors([row for row in rows if row.is_product], formula_s)
    whole = [each for each in found if each["kernel"] == "all products"]
    return [each | {"kernel": "all products, without what was measured of their shape"} for each in whole]


def made(files: Sequence[Path]) -> dict[str, Any]:
    """What profiles/published/time.json has."""
    compute, network, throughput, measurements, distributed = files
    of_vidur = read_rows(compute)
    runs = compare(json.loads(throughput.read_text(encoding="utf-8")))
    recipes = of_recipes(measurements, distributed)
    for row in recipes:
        if "estimated" in row:
            row["error"] = round(row["estimated"] / row["measured"] - 1, 4)
    kept = ("id", "model", "gpu", "gpus", "seq_len", "measured", "estimated", "from", "to", "error")
    return {
        "provenance": provenance(),
        "kernels": [
            each
            for rows in (
                [row for row in of_vidur if not row.is_product or rows_aside(row.m)],
                *map(read_rows, (network, ATTENTION, OTHER_DEVICES, UNFITTED)),
            )
            for each in errors(rows)
        ]
        + of_new_shapes(of_vidur)
        + of_two_layers(of_vidur),
        "step_kernels": step_kernels(),
        "runs": [{name: row[name] for name in kept} for row in runs if row["error"] is not None],
        "run_errors": summary(runs),
        "recipes": recipes,
    }


def main(arguments: Sequence[str]) -> None:
    """See the module's docstring."""
    files = [Path(name) for name in arguments if not name.startswith("--")]
    if files and len(files) != 5:
        sys.exit((__doc__ or "").split("\n\n")[1])
    if files:
        write_whole(RESULTS, json.dumps(made(files), indent=1) + "\n")
    write_page(check="--check" in arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
