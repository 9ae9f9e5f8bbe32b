"""Hold the time of peft's methods against what their authors measured, on an NVIDIA L40S.

    python -m benchmarks.time.peft_methods                 simulate every method: profiles/published/peft.json
    python -m benchmarks.time.peft_methods --read FOLDER   first make peft_methods.csv anew

FOLDER is method_comparison/MetaMathQA of huggingface/peft (Apache-2.0), where one script trains Llama-3.2-3B
by each method: 5,000 steps of 4 rows in bf16, AdamW on adapters in fp32, gradients clipped, torch 2.13. Rows
of like lengths are batched, 840 tokens of text a step in the mean, and a step ends when its loss is printed.

Estimated is a step of 4 rows of 227 tokens, 908 with their padding: beside weights, gradients and optimizer
states the script keeps 0.31 GiB between steps, of which a token takes 256,512 B (its logits in bf16) and
114,688 B (its keys and values in 28 layers, since the cache for generating is on).
"""

import csv
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.hardware import find_hardware
from harness.recipe import Recipe
from harness.simulate import simulate
from harness.system import provenance, quiet_libraries, write_whole

CSV = Path(__file__).with_name("peft_methods.csv")
FILE = Path(__file__).parents[2] / "profiles" / "published" / "peft.json"
ROWS, TOKENS = 4, 227
STEP: dict[str, Any] = {
    "model": "llama-3.2-3b",
    "micro_batch_size": ROWS,
    "seq_len": TOKENS,
    "max_grad_norm": 1.0,
    "weight_decay": 0.1,
}
OF_LORA = {"r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}


def read(folder: Path) -> None:
    """Write the CSV file: a row for each method whose run was a success on an L40S with torch 2.13."""
    rows: list[list[Any]] = []
    for file in sorted((folder / "results").glob("*.json")):
        found = json.loads(file.read_bytes())
        trained, about = found["train_info"], found["meta_info"]
        steps = [each["train time"] for each in trained["metrics"] if "train time" in each]
        known = about["system_info"].get("accelerator"), about["package_info"]["torch-version"][:4]
        if known != ("NVIDIA L40S", "2.13") or len(steps) != 20:
            continue
        name = found["run_info"]["experiment_name"]
        step_ms = sum(steps) / found["run_info"]["train_config"]["max_steps"] * 1e3
        config = json.dumps(_changed(found["run_info"]["peft_config"]))
        rows.append([name, config, trained["num_trainable_params"], f"{step_ms:.1f}"])
    with CSV.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows(
            [["experiment", "config", "trainable", "step_ms"], *rows]
        )


def _changed(config: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a method's config that differ from what the installed peft would take."""
    import peft

    if config is None:
        return {}
    kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(config["peft_type"])
    if kind is None:
        return config
    plain = {
        each.name: each.default_factory() if each.default_factory is not MISSING else each.default
        for each in fields(kind)
        if each.name not in ("base_model_name_or_path", "peft_version", "peft_type", "task_type")
    }
    own = {name: config[name] for name, usual in plain.items() if config.get(name, usual) != usual}
    return {"peft_type": config["peft_type"], **own}


def recipe(config: dict[str, Any]) -> Recipe:
    """The recipe of one row. Raises InputError for what no recipe says."""
    own = dict(config)
    targets = own.pop("target_modules", None)
    of_adapter: dict[str, Any] = {}
    if own.get("peft_type") == "LORA":
        own.pop("peft_type")
        of_adapter = {"adapter": "lora", "lora_rank": 8, "lora_alpha": 8}
        of_adapter |= {OF_LORA[name]: own.pop(name) for name in OF_LORA if name in own}
        of_adapter |= {"lora_targets": targets or ["q_proj", "v_proj"], "peft": own}
    elif own:
        of_adapter = {"adapter": "peft", "peft": own | ({"target_modules": targets} if targets else {})}
    return Recipe(**STEP, **of_adapter)


def estimates() -> Iterator[dict[str, Any]]:
    """Each method: measured and estimated seconds, or why there is no estimate."""
    device = find_hardware("l40s")
    with CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            about = {
                "id": row["experiment"].replace("llama-3.2-3B-", ""),
                "measured_ms": float(row["step_ms"]),
            }
            try:
                profile = simulate(recipe(json.loads(row["config"])), device, explain_oom=False)[0]
            except (InputError, ValueError) as error:
                yield about | {"left_out": str(error)}
                continue
            time = profile.step.time_s
            low, middle, high = ((each or 0.0) * 1e3 for each in (time.p10, time.median, time.p90))
            yield about | {
                "estimated_ms": round(middle, 1),
                "from_ms": round(low, 1),
                "to_ms": round(high, 1),
                "error": round(middle / about["measured_ms"] - 1, 4),
            }


def main() -> None:
    """See the module's docstring."""
    quiet_libraries()
    if "--read" in sys.argv:
        read(Path(sys.argv[sys.argv.index("--read") + 1]))
    rows: list[dict[str, Any]] = []
    for row in estimates():
        print(json.dumps(row), flush=True)
        rows.append(row)
    errors = sorted(abs(row["error"]) for row in rows if "error" in row)
    document = {"provenance": provenance(), "rows": rows, "count": len(errors)}
    document |= {"median": statistics.median(errors), "p90": errors[int(0.9 * len(errors))]}
    write_whole(FILE, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
