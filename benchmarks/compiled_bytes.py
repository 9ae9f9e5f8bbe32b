"""What the kernels that torch.compile makes of one block read and write, by Inductor's own count.

    harness emulate --gpu a100-80gb -- python -m benchmarks.compiled_bytes [MODEL...]

Nothing has to run: Inductor plans its kernels for the virtual GPU, and counts the bytes that each of them
reads and writes. Products and attention are not among them. Two depths tell what one block takes. Writes
profiles/cpu/compiled_bytes.json, in which counts by the same libraries stay, with the bytes that napkin says
today a compiled block keeps for backward: harness/napkin/timing.py counts passes over those.
"""

import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch._inductor import metrics
from transformers import AutoConfig, AutoModelForCausalLM

from harness.architecture import find_config, load_shape, read_config
from harness.hardware.hardware import find_hardware
from harness.napkin import estimate
from harness.napkin.terms import sum_of
from harness.recipe.check import check_recipe
from harness.system.files import write_whole

RESULTS = Path(__file__).parents[1] / "profiles" / "cpu" / "compiled_bytes.json"
MODELS = ("llama-3.2-3b", "llama-3.1-8b", "mistral-7b", "qwen2.5-1.5b", "qwen2.5-7b")
LIBRARIES = ("torch", "triton", "transformers")
SEQ_LEN = 1024
DEPTHS = (2, 4)
VOCABULARY = 1024
"""Of any size: embeddings and the head are the same at both depths."""


def counted(model: str, layers: int) -> tuple[int, int]:
    """Bytes of all kernels but products and attention: in forward, and in backward."""
    config = AutoConfig.for_model(**read_config(find_config(model)))
    config.vocab_size, config.use_cache = VOCABULARY, False
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.num_hidden_layers = layers
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        ids = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    torch._dynamo.reset()
    compiled: Any = torch.compile(made.train(), fullgraph=True)
    found = []
    metrics.reset()
    loss = compiled(input_ids=ids, labels=ids).loss
    for do in (None, loss.backward):
        if do is not None:
            do()
        nodes = [node for node, _ in metrics.nodes_num_elem if not node.is_extern()]
        found.append(sum(node.get_read_write_buffers_sizes() for node in nodes))
        metrics.reset()
    return found[0], found[1]


def kept_bytes(model: str) -> int:
    """What napkin says that a compiled block keeps for backward."""
    fields = {"model": model, "precision": "bf16", "compile": True, "seq_len": SEQ_LEN, "attention": "sdpa"}
    memory = estimate(check_recipe(fields, model), find_hardware("a100-80gb"))
    (block, *_) = load_shape(model).blocks
    return sum_of(memory.activations.kept_by(block))


def block_bytes(model: str) -> list[int]:
    """What one block takes, in forward and in backward."""
    few, many = (counted(model, layers) for layers in DEPTHS)
    return [(b - a) // (DEPTHS[1] - DEPTHS[0]) for a, b in zip(few, many, strict=True)]


def row(model: str, block: list[int]) -> dict[str, Any]:
    """Of one model, in forward and in backward: bytes of a block, and over those that it keeps."""
    kept = kept_bytes(model)
    passes = [round(size / kept, 2) for size in block]
    return {"model": model, "kept_bytes": kept, "block_bytes": block, "passes": passes}


def main(models: list[str]) -> None:
    """See the module's docstring; models that are named are printed only."""
    torch._logging.set_logs(inductor_metrics=True)
    torch._inductor.config.force_disable_caches = True
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    versions = {name: version(name) for name in LIBRARIES}
    counts = found["rows"] if found.get("versions") == versions and not models else []
    known, rows = {each["model"]: each["block_bytes"] for each in counts}, list[dict[str, Any]]()
    for model in models or MODELS:
        rows.append(row(model, known.get(model) or block_bytes(model)))
        print(rows[-1], flush=True)
        if not models:
            write_whole(RESULTS, json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
