"""Record random recipes on a virtual GPU: toggles as they come, a few layers of real models.

    harness emulate --gpu a100-80gb -- \\
        python -m benchmarks.virtual_gpu.random_recipes DIR --seed 1 --count 40
    python -m benchmarks.traces compare DIR/*.json.gz

Whatever is no valid recipe is drawn anew. Each recipe runs in a process of its own; running out of memory is
a recording too. A recipe that fails otherwise is named, and ends the programme with status 1.
"""

import os
import random
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.gpu_programme.__main__ import how_to_start
from benchmarks.gpu_programme.import_results import sanitised_trace
from benchmarks.gpu_programme.recipes import Spec
from benchmarks.gpu_programme.tasks import Context, import_libraries, prepare_process
from benchmarks.gpu_programme.traces import record
from harness.errors import InputError
from harness.hardware import find_hardware
from harness.system.files import write_whole

MODELS = (
    ("llama-3.2-1b", 4),
    ("llama-3.1-8b", 2),
    ("gpt2-medium", 4),
    ("gemma-2-2b", 1),
    ("qwen2.5-7b", 2),
    ("mistral-7b", 2),
    ("mixtral-8x7b", 1),
)
"""Names in recipes/models, and how many of their layers."""
TIMEOUT_S = 180


def draw(rng: random.Random, half: str) -> tuple[dict[str, Any], int]:
    """The fields of a recipe that may not be valid, and the layers of its model. `half`: bf16 or fp16."""
    model, layers = rng.choice(MODELS)
    fields: dict[str, Any] = {
        "model": model,
        "micro_batch_size": rng.choice((1, 2, 3, 4)),
        "seq_len": rng.choice((128, 256, 333, 512, 1000, 1024, 2048)),
        "precision": rng.choice((half, half, f"{half}-mixed", "fp32")),
        "optimizer": rng.choice(("adamw", "adamw", "adamw_8bit", "paged_adamw", "sgd", "adafactor")),
        "gradient_checkpointing": rng.random() < 0.5,
        "attention": rng.choice(("sdpa", "sdpa", "eager")),
    }
    if rng.random() < 0.5:
        fields["adapter"] = rng.choice(("lora", "lora", "ia3"))
        if rng.random() < 0.5:
            fields["quantization"] = rng.choice(("nf4", "nf4", "int8"))
    if fields.get("adapter") == "lora":
        fields["lora_rank"] = rng.choice((4, 8, 16, 64))
        fields["lora_dropout"] = rng.choice((0.0, 0.0, 0.1))
    if fields.get("quantization") == "nf4":
        fields["double_quant"] = rng.random() < 0.5
        fields["upcast_for_kbit"] = rng.random() < 0.3
    if fields["optimizer"] in ("adamw", "sgd"):
        fields["optimizer_impl"] = rng.choice(("foreach", "fused", "for_loop"))
    sometimes: tuple[tuple[float, str, Any], ...] = (
        (0.3, "max_grad_norm", 1.0),
        (0.25, "loss", "fused_linear"),
        (0.2, "gradient_accumulation_steps", 2),
        (0.15, "packing", True),
        (0.15, "offload", ["activations"]),
        (0.1, "optimizer_in_backward", True),
        (0.1, "master_weights", True),
    )
    fields |= {name: value for chance, name, value in sometimes if rng.random() < chance}
    return fields, layers


def run(spec: Spec, folder: Path) -> None:
    """Record one recipe, in this process. Ends it with 2 for no valid recipe, and with 1 if it fails."""
    try:
        result = record(Context("cuda", False, folder), spec)
    except InputError:
        sys.exit(2)
    write_whole(folder / f"{spec.name}.json.gz", sanitised_trace(result["trace"], spec.name))


def main() -> int:
    """Exit status: 1 if a recipe failed."""
    parser = parser_of("benchmarks.virtual_gpu.random_recipes", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--attention", help="the attention of every recipe; as it comes unless given")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    has_bf16 = find_hardware(os.environ["VIRTUAL_GPU"]).supports("bf16")
    prepare_process("cuda")
    context = Context("cuda", False, options.folder)
    import_libraries(context)
    processes = get_context(how_to_start(context)[0])
    rng = random.Random(options.seed)
    done = failed = 0
    while done < options.count:
        fields, layers = draw(rng, "bf16" if has_bf16 else "fp16")
        fields["attention"] = options.attention or fields["attention"]
        one_row = fields["micro_batch_size"] == 1 and not fields.get("packing")
        if one_row and fields["attention"].startswith("flash"):
            continue  # every position is zero here: transformers takes a single row of them for documents
        spec = Spec(f"random-{options.seed}-{done}", None, fields, layers=layers)
        process = processes.Process(target=run, args=(spec, options.folder))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
        if process.exitcode == 2:
            continue
        done += 1
        failed += process.exitcode != 0
        print(f"{'ok' if process.exitcode == 0 else 'FAILED'} {spec.name} {fields}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
