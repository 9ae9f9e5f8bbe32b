"""A fixed piece of work once a second: what a processor is worth while something else is measured.

The operators are those of a small training step, always on the same numbers; nothing is kept from one time
to the next, so that a change of its processor time is a change of the machine.

    python -m benchmarks.soak.reference FILE

Appends a line for each time to FILE, until it is ended: when it was done, and the processor time it took.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

EVERY_S = 1.0
REPEATS = 6
ROWS, WIDTH, INNER, HEADS = 1024, 128, 512, 4
"""Near those of recipes/smoke.yaml: 4 x 256 tokens, with the products of a block."""


class Reference(NamedTuple):
    """One time."""

    at_s: float
    """Of time.monotonic, which all processes of a machine share."""
    cpu_s: float


def work(rows: Tensor, up: Tensor, down: Tensor) -> None:
    """Forward and backward of a layer: attention, and two products with an activation between them."""
    rows = rows.detach().requires_grad_()
    heads = rows.view(4, ROWS // 4, HEADS, WIDTH // HEADS).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    inner = functional.silu(attended.transpose(1, 2).reshape(ROWS, WIDTH) @ up)
    functional.layer_norm(inner @ down, (WIDTH,)).square().sum().backward()


def read_references(path: Path) -> list[Reference]:
    """The whole lines of FILE."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Reference(**json.loads(line)) for line in lines if line.endswith("\n")]


def main() -> None:
    """Work, write, wait; for ever."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes: list[Any] = [(ROWS, WIDTH), (WIDTH, INNER), (INNER, WIDTH)]
    tensors = [torch.randn(shape).requires_grad_(shape != shapes[0]) for shape in shapes]
    with Path(sys.argv[1]).open("a", buffering=1) as file:
        while True:
            began = time.process_time()
            for _ in range(REPEATS):
                work(*tensors)
                for tensor in tensors:
                    tensor.grad = None
            line = Reference(time.monotonic(), time.process_time() - began)
            file.write(json.dumps(line._asdict()) + "\n")
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
