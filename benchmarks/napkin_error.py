"""How far napkin is from the simulation, over 60 models and several toggles: profiles/napkin_error.json.

    python -m benchmarks.napkin_error              simulate every row (half an hour on one core) and write the file
    python -m benchmarks.napkin_error --napkin     ask napkin again, with the simulated bytes that stand there
    python -m benchmarks.napkin_error MODEL ...    only these models

The models are those of recipes/models and, in benchmarks/napkin_models.json, sizes of published ones as the
config classes of transformers take them. Each is trained in full and with LoRA, and with one more set of
toggles, in turn, so that the sets meet many families.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.recipe import Recipe, list_models

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
    "qlora, one step of 8 x 512": {**QLORA, "seq_len": 512, "micro_batch_size": 8},
}
BASE: dict[str, Any] = {"precision": "bf16", "seq_len": 2048}
EAGER_ONLY = (
    *("gemma-2-2b", "gemma-2-9b", "bloom-1b7", "gpt-j-6b", "gpt-neo-1.3b"),
    *("gpt-oss-20b", "mamba-1.4b", "mamba2-1.3b"),
)
"""They have no attention by sdpa."""
NOT_ALL_LINEAR = {
    "falcon-h1-1.5b": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mamba-1.4b": ["in_proj"],
    "mamba2-1.3b": ["in_proj"],
    "moonlight-16b-a3b": ["q_proj", "o_proj"],
}
"""peft refuses to adapt a layer that all-linear would name, or to drop its inputs."""
SPARSE_FIELDS = ("simulated_bytes", "napkin_bytes", "refused")


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
        for toggles, fields in [*ALWAYS.items(), in_turn[index % len(in_turn)]]:
            fields = BASE | fields | {"model": model}
            if name.startswith("gpt2"):
                fields["seq_len"] = min(1024, fields["seq_len"])
            if name in EAGER_ONLY:
                fields["attention"] = "eager"
            if name in NOT_ALL_LINEAR and "adapter" in fields:
                fields["lora_targets"] = NOT_ALL_LINEAR[name]
            rows.append((name, toggles, Recipe(**fields)))
    return rows


def simulated(recipe: Recipe) -> int:
    """Peak bytes allocated of a simulated step on a device where everything fits."""
    from harness.simulate import simulate

    return simulate(recipe, with_memory(find_hardware(DEVICE), PLENTY_BYTES))[0].memory.peak_allocated_bytes


def napkin(recipe: Recipe) -> int:
    """The same by arithmetic."""
    from harness.napkin import predict

    return predict(recipe, with_memory(find_hardware(DEVICE), PLENTY_BYTES)).memory.peak_allocated_bytes


def main(arguments: list[str]) -> None:
    again = "--napkin" in arguments
    chosen = [name for name in arguments if not name.startswith("--")]
    before = (
        {(r["model"], r["toggles"]): r for r in json.loads(FILE.read_bytes())["rows"]}
        if FILE.exists()
        else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, toggles, recipe in cases(models(Path(folder))):
            row = before.setdefault((name, toggles), {"model": name, "toggles": toggles})
            if (chosen and name not in chosen) or (again and "simulated_bytes" not in row):
                continue
            if not again:
                row["simulated_bytes"] = asked(simulated, recipe)
            row["napkin_bytes"] = asked(napkin, recipe)
            print(name, toggles, row, file=sys.stderr)
    FILE.write_text(json.dumps({"device": DEVICE, "rows": list(before.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
