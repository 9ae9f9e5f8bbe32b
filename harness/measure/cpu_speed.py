"""How fast this CPU multiplies matrices, by trying it."""

from __future__ import annotations

import time

import torch

from harness.training import DTYPES

SIDE = 512
"""Rows and columns of what is multiplied: large enough for all cores, done in milliseconds on most."""
ENOUGH_S = 0.2


def matmul_flops_per_s(dtype: str) -> float:
    """FLOP/s of square matrix products in `dtype` (fp32, bf16, fp16) here, tried for a fifth of a second.

    The best of them: what else runs on the machine makes one slower and none faster.
    """
    kind = DTYPES[dtype]
    square = torch.ones(SIDE, SIDE, dtype=kind)
    torch.mm(square, square)  # the first one chooses and compiles its kernel
    best_s, spent_s = float("inf"), 0.0
    while spent_s < ENOUGH_S:
        began = time.perf_counter()
        torch.mm(square, square)
        took_s = time.perf_counter() - began
        best_s, spent_s = min(best_s, took_s), spent_s + took_s
    return 2 * SIDE**3 / best_s
