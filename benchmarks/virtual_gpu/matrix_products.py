"""Record what matrix products do with the caching allocator, for random shapes and strides, on a virtual GPU.

    harness emulate --gpu h200 -- \\
        python -m benchmarks.virtual_gpu.matrix_products tests/recordings/matrix_products/h200-torch-2.13.json

PyTorch chooses the library, copies operands that it cannot read, and asks for the library's workspace.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import parser_of
from harness.system.files import write_whole

OPERATORS = ("mm", "bmm", "baddbmm", "addmm", "addmm")
SIZES = (1, 1, 2, 3, 8, 64, 100, 256)
DTYPES = ("float32", "bfloat16", "float16")


def draw(rng: random.Random) -> dict[str, Any]:
    """A call: an operator, (shape, strides) of each operand, and what scales them."""
    operator = rng.choice(OPERATORS)
    rows, inner, columns = (rng.choice(SIZES) for _ in range(3))
    batch = rng.choice((1, 2, 3)) if operator in ("bmm", "baddbmm") else None
    operands = [_matrix(rng, batch, rows, inner), _matrix(rng, batch, inner, columns)]
    scales: dict[str, float] = {}
    if operator in ("addmm", "baddbmm"):
        bias = _matrix(rng, batch, rng.choice((1, rows)) if batch is None else rows, columns)
        operands.insert(0, ([columns], [1]) if batch is None and rng.random() < 0.4 else bias)
        scales = {"beta": rng.choice((1, 1, 1, 2)), "alpha": rng.choice((1, 1, 2))}
    return {"operator": operator, "dtype": rng.choice(DTYPES), "operands": operands, "scales": scales}


def _matrix(rng: random.Random, batch: int | None, rows: int, columns: int) -> tuple[list[int], list[int]]:
    """Dense by row or column, part of something wider, without a dense dimension, or one row repeated."""
    strides = rng.choice(
        ([columns, 1], [1, rows], [columns + 8, 1], [1, rows + 8], [2 * columns + 2, 2], [0, 1])
    )
    if batch is None:
        return [rows, columns], strides
    whole = (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1
    return [batch, rows, columns], [rng.choice((whole, whole, 0)), *strides]


def tensors(call: dict[str, Any], device: str) -> list[torch.Tensor]:
    """The operands of a call, without values."""
    dtype = getattr(torch, call["dtype"])
    return [torch.empty_strided(*operand, dtype=dtype, device=device) for operand in call["operands"]]


def overload(call: dict[str, Any]) -> Any:
    """The operator of a call."""
    return getattr(torch.ops.aten, call["operator"]).default


def actions(call: dict[str, Any]) -> list[int]:
    """What the allocator is asked for while the operator runs, in bytes and in order; what it is given back,
    less than 0. The library has no workspace before.
    """
    operands = tensors(call, "cuda")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.memory._record_memory_history(context=None)
    made = overload(call)(*operands, **call["scales"])
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    del made
    signs = {"alloc": 1, "free_requested": -1}
    (trace,) = snapshot["device_traces"]
    return [signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]


def main() -> None:
    parser = parser_of("benchmarks.virtual_gpu.matrix_products", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    calls = [draw(rng) for _ in range(options.count)]
    head = {
        "device": os.environ["VIRTUAL_GPU"],
        "torch": torch.__version__,
        "native_jit": os.environ.get("TORCH_DISABLE_NATIVE_JIT") != "1",
        "seed": options.seed,
    }
    lines = ",\n".join(json.dumps(call | {"actions": actions(call)}) for call in calls)
    write_whole(options.out, f'{json.dumps(head)[:-1]}, "calls": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
