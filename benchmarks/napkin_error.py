"""How far napkin is from the simulation, over 60 models and several toggles: profiles/napkin_error.json.

    python -m benchmarks.napkin_error              simulate every row (over an hour) and write the file
    python -m benchmarks.napkin_error --napkin     ask the napkin again; simulate rows that the file lacks

The models are those of recipes/models and, in benchmarks/napkin_models.json, sizes of published ones, as
transformers' configuration classes take them. Each is trained in full and with LoRA, and with one more set of
toggles, in turn, so that the sets meet many families. `python -m pages.readme` writes the guide's numbers.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.napkin import predict
from harness.recipe import Recipe, list_models
from harness.step_profile import StepProfile
from harness.system import provenance, quiet_libraries, write_whole

HERE = Path(__file__).parent
FILE = HERE.parent / "profiles" / "napkin_error.json"
DEVICE = "h200"
LORA: dict[str, Any] = {"adapter": "lora"}
QLORA: dict[str, Any] = {**LORA, "quantization": "nf4", "double_quant": True}
ALWAYS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": True},
    "lora": {**LORA, "micro_batch_size": 2},
}
IN_TURN: dict[str, dict[str, Any]] = {
    "qlora": {**QLORA, "gradient_checkpointing": True, "optimizer": "paged_adamw_8bit"},
    "full, nothing recomputed": {"micro_batch_size": 4},
    "full, fp32": {"precision": "fp32", "gradient_checkpointing": True},
    "full, bf16-mixed": {"precision": "bf16-mixed", "gradient_checkpointing": True},
    "lora, eager": {**LORA, "attention": "eager", "seq_len": 1024},
    "full, adamw_8bit, accumulated": {"optimizer": "adamw_8bit", "gradient_accumulation_steps": 4},
    "lora, offloaded activations": {**LORA, "offload": ["activations"], "micro_batch_size": 4},
    "full, stepped in backward": {"optimizer_in_backward": True, "gradient_checkpointing": True},
    "lora, base dtype, dropout": {
        **LORA,
        "adapter_dtype": "base",
        "lora_dropout": 0.05,
        "gradient_checkpointing": True,
        "micro_batch_size": 8,
    },
    "full, fp32 master weights, fused": {"master_weights": True, "optimizer_impl": "fused"},
    "full, fsdp 8": {
        "parallel": "fsdp",
        "dp_shard": 8,
        "precision": "bf16-mixed",
        "reduce_dtype": "fp32",
        "gradient_checkpointing": True,
    },
    "lora, ddp 8": {**LORA, "parallel": "ddp", "dp_replicate": 8, "gradient_checkpointing": True},
    "qlora, 8 x 512": {**QLORA, "seq_len": 512, "micro_batch_size": 8},
}
BASE: dict[str, Any] = {"precision": "bf16", "seq_len": 2048}
EAGER_ONLY = (
    *("gemma-2-2b", "gemma-2-9b", "bloom-1b7", "gpt-j-6b", "gpt-neo-1.3b"),
    *("gpt-oss-20b", "mamba-1.4b", "mamba2-1.3b", "doge-160m"),
)
"""They have no attention by sdpa."""
NOT_ALL_LINEAR = {
    "falcon-h1-1.5b": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "llama-4-scout": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mamba-1.4b": ["in_proj"],
    "mamba2-1.3b": ["in_proj"],
    "moonlight-16b-a3b": ["q_proj", "o_proj"],
    "nemotron-3-nano-30b": ["in_proj", "q_proj", "o_proj"],
    "nemotron-h-11-layers": ["q_proj", "o_proj", "up_proj", "down_proj"],
}
"""peft refuses to adapt a layer that all-linear would name, or to drop its inputs."""


def models(folder: Path) -> dict[str, str]:
    """What a recipe's `model` says for each: a name in recipes/models, or a file written into `folder`."""
    found = {name: name for name in list_models() if name != "tiny-llama-bytes"}
    for name, config in json.loads((HERE / "napkin_models.json").read_bytes()).items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        found[name] = str(path)
    return found


def cases(found: dict[str, str]) -> list[tuple[str, str, Recipe]]:
    """(model, toggles, recipe) of every row."""
    rows: list[tuple[str, str, Recipe]] = []
    in_turn = list(IN_TURN.items())
    for index, (name, model) in enumerate(found.items()):
        for toggles, own in [*ALWAYS.items(), in_turn[index % len(in_turn)]]:
            fields = BASE | own | {"model": model}
            if name.startswith("gpt2"):
                fields["seq_len"] = min(1024, fields["seq_len"])
            if name in EAGER_ONLY:
                fields["attention"] = "eager"
            if name in NOT_ALL_LINEAR and "adapter" in fields:
                fields["lora_targets"] = NOT_ALL_LINEAR[name]
            rows.append((name, toggles, Recipe(**fields)))
    return rows


def numbers(profile: StepProfile) -> dict[str, Any]:
    """Of a profile, what is compared."""
    time_s, peak_bytes = profile.step.time_s.median, profile.memory.peak_allocated_bytes
    return {"bytes": peak_bytes, "s": None if time_s is None else float(f"{time_s:.4g}")}


def main(again: bool) -> None:
    """Write the file; with `again`, only the napkin's side of rows that it has."""
    hardware = with_memory(find_hardware(DEVICE), PLENTY_BYTES)
    known = json.loads(FILE.read_bytes()) if FILE.exists() else {}
    before = {(row["model"], row["toggles"]): row for row in known.get("rows", [])}
    quiet_libraries()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, toggles, recipe in cases(models(Path(folder))):
            row: dict[str, Any] = {"model": name, "toggles": toggles}
            if again and (name, toggles) in before:
                row |= {side: before[name, toggles][side] for side in ("simulated", "refused")}
            else:
                row |= _simulated(recipe, hardware)
            row["napkin"] = numbers(predict(recipe, hardware))
            rows.append(row)
            print(json.dumps(row), flush=True)
    versions = known["versions"] if again else provenance()["versions"]
    document = {"device": DEVICE, "versions": versions, "rows": rows}
    write_whole(FILE, json.dumps(document, indent=1) + "\n")


def _simulated(recipe: Recipe, hardware: Any) -> dict[str, Any]:
    from harness.simulate import simulate

    try:
        return {"simulated": numbers(simulate(recipe, hardware)[0]), "refused": ""}
    except InputError as error:
        return {"simulated": None, "refused": str(error).replace(recipe.model, Path(recipe.model).stem)}


if __name__ == "__main__":
    main("--napkin" in sys.argv[1:])
