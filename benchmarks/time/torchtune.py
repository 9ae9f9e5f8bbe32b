"""torchtune's own recipes on the virtual GPU, beside what its README says they took on an A100.

    git clone https://github.com/pytorch/torchtune && git -C torchtune checkout 1814feb17
    pip install --no-deps --target others -r tests/virtual_gpu/programs/others.txt
    PYTHONPATH=others python -m benchmarks.time.torchtune torchtune MEASUREMENTS [ROW ...] [--out FILE]

The commit is the one that the table came with. Each row is a recipe of torchtune's, unchanged, which is given
weights, a tokenizer and documents that need no download (benchmarks/time/torchtune_parts.py). MEASUREMENTS is
a file of published peaks, whose rows of torchtune name the table's. A row takes 10 to 70 s.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.system import PACKAGE, provenance, write_whole

GPU = "a100-80gb"
OUT = PACKAGE.parent / "profiles" / "published" / "torchtune.json"
COMMIT = "1814feb17"
TABLE = "torchtune/opt-table/"
ROWS_A_STEP, LENGTH, STEPS = 2, 4096, 5
PARTS = "benchmarks.time.torchtune_parts"
GIVEN = {
    "tokenizer._component_": f"{PARTS}.Tokenizer",
    "tokenizer.max_seq_len": LENGTH,
    "dataset._component_": f"{PARTS}.documents",
    "dataset.packed": True,
    "checkpointer._component_": f"{PARTS}.Weights",
    "batch_size": ROWS_A_STEP,
    "gradient_accumulation_steps": 1,
    "max_steps_per_epoch": STEPS,
}
"""What every row has beside its config: the table's "batch size 2, max sequence length 4096"."""
PACKED = {
    "loss._component_": "torch.nn.CrossEntropyLoss",
    "optimizer._component_": "torch.optim.AdamW",
    "optimizer.fused": True,
    "optimizer_in_bwd": False,
    "enable_activation_checkpointing": False,
}
"""The first row with packed documents. Each further one adds to the one before, as the table says."""
COMPILED = PACKED | {"compile": True}
CHUNKED = COMPILED | {"loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
CHECKPOINTED = CHUNKED | {"enable_activation_checkpointing": True}
IN_BACKWARD = CHECKPOINTED | {"optimizer_in_bwd": True}
ADAPTER = {
    "compile": True,
    "loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "enable_activation_checkpointing": True,
    "enable_activation_offloading": True,
}
"""Of LoRA and QLoRA, by the command for the table's last row."""
FULL, OF_ADAPTERS = "full_finetune_single_device", "lora_finetune_single_device"
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "+packed dataset": (FULL, "3B_full_single_device", PACKED),
    "+compile": (FULL, "3B_full_single_device", COMPILED),
    "+chunked cross entropy": (FULL, "3B_full_single_device", CHUNKED),
    "+activation checkpointing": (FULL, "3B_full_single_device", CHECKPOINTED),
    "+fuse optimizer step into backward": (FULL, "3B_full_single_device", IN_BACKWARD),
    "+activation offloading": (
        FULL,
        "3B_full_single_device",
        IN_BACKWARD | {"enable_activation_offloading": True},
    ),
    "LoRA": (OF_ADAPTERS, "3B_lora_single_device", ADAPTER),
    "QLoRA": (OF_ADAPTERS, "3B_qlora_single_device", ADAPTER),
}
"""The table's rows: recipe, config, and what differs from the config. It does not say which 8-bit AdamW its
"+8-bit AdamW" is, nor how long the rows of its baseline are, which are not packed."""
PEAK = re.compile(r"peak_memory_active:([\d.]+)")


def run(torchtune: Path, row: str, folder: Path) -> dict[str, Any]:
    """One row's command: seconds of a step as the clock has them, and the GiB that the recipe itself logs."""
    recipe, config, fields = ROWS[row]
    recipes = torchtune / "recipes"
    given = {**GIVEN, **fields, "output_dir": folder, "checkpointer.output_dir": folder}
    command = [
        sys.executable,
        recipes / f"{recipe}.py",
        "--config",
        recipes / "configs/llama3_2" / f"{config}.yaml",
    ]
    command += [f"{name}={value}" for name, value in given.items()]
    emulate = [
        sys.executable,
        "-m",
        "harness",
        "emulate",
        "--gpu",
        GPU,
        "--out",
        folder / "clock",
        "--",
        *command,
    ]
    path = os.pathsep.join([str(torchtune.resolve()), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(word) for word in emulate],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{row}: {done.stderr[-3000:]}")
    (clock,) = (json.loads(each.read_text("utf-8")) for each in (folder / "clock").glob("*-times.json"))
    (log,) = folder.glob("log_*.txt")
    peaks = [float(found) for found in PEAK.findall(log.read_text("utf-8"))]
    return {
        "step_s": clock["step_time_s"],
        "host_gaps_s": clock["host_gaps_s"],
        "unknown_kernels": clock["unknown"],
        "peak_active_gib": max(peaks),
    }


def labels_a_step() -> float:
    """Tokens with a label in a step, which torchtune counts for its tokens a second. What fills a row up has
    none."""
    from benchmarks.time.torchtune_parts import Tokenizer, documents

    rows = documents(Tokenizer(LENGTH), packed=True).packs
    return ROWS_A_STEP * sum(int((row["labels"] >= 0).sum()) for row in rows) / len(rows)


def main(torchtune: Path, measurements: Path, rows: Sequence[str], out: Path) -> None:
    """Run `rows`, and write what they took to `out`."""
    cases = json.loads(measurements.read_text(encoding="utf-8"))["cases"]
    measured = {case["id"]: case["measured"] for case in cases if case["id"].startswith(TABLE)}
    labels, found = labels_a_step(), list[dict[str, Any]]()
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            ran = run(torchtune, row, Path(folder))
        published = measured[TABLE + row]
        found.append(
            {
                "id": TABLE + row,
                "gpu": GPU,
                "measured": published["tokens_per_s"],
                "estimated": round(labels / ran["step_s"], 1),
                "by": "emulated",
                "measured_gib": published["peak_active_GiB"],
                **ran,
            }
        )
        print(found[-1])
    document = {"provenance": provenance(), "torchtune": COMMIT, "labels_a_step": labels, "rows": found}
    write_whole(out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    parser = parser_of("benchmarks.time.torchtune", __doc__)
    parser.add_argument("torchtune", type=Path)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    main(given.torchtune, given.measurements, given.rows or list(ROWS), given.out)
