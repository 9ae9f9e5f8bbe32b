"""Record the workspaces that cuDNN's attention asks for, for random shapes, on a virtual GPU.

    harness emulate --gpu h200 -- \\
        python -m benchmarks.virtual_gpu.cudnn_plans tests/recordings/cudnn_plans/h200-torch-2.13.json

cuDNN plans as it does on the device; PyTorch asks its caching allocator for what the plan wants.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import parser_of
from harness.system.files import write_whole

ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
LENGTHS = (2, 7, 17, 64, 77, 128, 129, 200, 256, 500, 512, 1000, 1024, 1536, 2048, 4096)
LARGEST_ELEMENTS = 1 << 28


def draw(rng: random.Random) -> dict[str, Any]:
    """A call of attention: grouped or not, causal, with a mask or neither, with and without dropout."""
    grouped = rng.choice((1, 1, 2, 3, 4, 7, 8))
    key_heads = rng.choice((1, 2, 3, 4, 8, 16, 32))
    length = rng.choice(LENGTHS)
    masked = rng.random() < 0.2
    return {
        "batch": rng.choice((1, 1, 2, 3, 4, 8)),
        "heads": key_heads * grouped,
        "key_heads": key_heads,
        "length": length,
        "key_length": length if rng.random() < 0.85 else rng.choice((64, 100, 129, 512, 1024)),
        "head_dim": rng.choice((8, 16, 24, 32, 40, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256)),
        "dtype": rng.choice(("bfloat16", "bfloat16", "float16")),
        "dropout_p": rng.choice((0.0, 0.0, 0.125)),
        "mask": rng.choice(("row", "head")) if masked else None,
        "is_causal": not masked and rng.random() < 0.7,
        "heads_first": rng.random() < 0.5,
    }


def workspaces(call: dict[str, Any]) -> dict[str, int]:
    """Bytes that forward and backward ask for and give back, by the allocator's own statistics."""
    batch, length, keys = call["batch"], call["length"], call["key_length"]

    def tensor(heads: int, rows: int) -> torch.Tensor:
        options = {"device": "cuda", "dtype": getattr(torch, call["dtype"])}
        if call["heads_first"]:
            return torch.empty(batch, heads, rows, call["head_dim"], **options)
        return torch.empty(batch, rows, heads, call["head_dim"], **options).transpose(1, 2)

    query = tensor(call["heads"], length)
    key, value = tensor(call["key_heads"], keys), tensor(call["key_heads"], keys)
    mask = None
    if call["mask"]:
        shape = (batch, 1 if call["mask"] == "row" else call["heads"], length, keys)
        mask = torch.empty(shape, device="cuda", dtype=query.dtype)
    how = (call["dropout_p"], call["is_causal"])
    forward, made = _taken_for_a_while(lambda: ATTENTION(query, key, value, mask, True, *how, False))
    out, sums, starts, key_starts, longest, longest_key, seed, offset, _ = made
    grad = torch.empty_like(out)
    lengths = (starts, key_starts, longest, longest_key)
    backward, _ = _taken_for_a_while(
        lambda: BACKWARD(grad, query, key, value, out, sums, seed, offset, mask, *lengths, *how)
    )
    return {"forward": forward, "backward": backward}


def _taken_for_a_while(operator: Any) -> tuple[int, Any]:
    operator()  # the first call of all may make what stays
    torch.cuda.reset_peak_memory_stats()
    made = operator()
    statistics = torch.cuda.memory_stats()
    name = "requested_bytes.all"
    return statistics[f"{name}.peak"] - statistics[f"{name}.current"], made


def main() -> None:
    parser = parser_of("benchmarks.virtual_gpu.cudnn_plans", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    refused = 0
    while len(rows) < options.count:
        call = draw(rng)
        elements = call["batch"] * call["heads"] * call["length"]
        if elements * max(call["head_dim"], call["key_length"] if call["mask"] else 0) > LARGEST_ELEMENTS:
            continue
        try:
            rows.append(call | workspaces(call))
        except RuntimeError as error:  # cuDNN has no kernel for it
            if "cuDNN" not in str(error):
                raise
            refused += 1
    head = {
        "device": os.environ["VIRTUAL_GPU"],
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "seed": options.seed,
        "refused": refused,
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_whole(options.out, f'{json.dumps(head)[:-1]}, "calls": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
