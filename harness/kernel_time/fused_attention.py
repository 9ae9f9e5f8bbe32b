"""How long fused attention takes, by kernel, direction, head size, length and mask.

    FLOPs that the kernel does / (peak x rate) x (1 + short / length)

A causal kernel computes half of the square of scores, but the blocks on the diagonal in full: the fitted
`short_causal` contains these, as well as the start and the end of each block. Rates are fitted to published
tables (benchmarks/time/attention.csv) for head sizes 64, 128 and 256, and interpolated for others. The
backward pass does 2.5 times the FLOPs of the forward one (the scores again, and four products).
"""

from collections.abc import Mapping
from typing import Literal

Direction = Literal["forward", "backward"]

BLOCK = 128
"""The keys of the largest blocks of scores: a kernel computes whole ones and leaves out those without any."""
SMALLEST = 64
"""The smallest head size whose rate was fitted."""
POWER_RATE = 0.5
"""The share of the peak from which on a kernel brings the device to its power limit."""
BACKWARD = 2.5
"""The FLOPs of the backward pass over those of the forward one: five products instead of two."""


def attention_flops(
    batch: float, heads: int, query: int, keys: int, head_dim: int, *, causal: bool, direction: Direction
) -> float:
    """FLOPs that a kernel does: of half of the square under a causal mask, as published tables count."""
    square = query * keys - query * query / 2 if causal and keys >= query else query * keys
    flops = 4.0 * batch * heads * square * head_dim
    return flops * (BACKWARD if direction == "backward" else 1.0)


def causal_length(length: float, window: int | None) -> float:
    """The length of a causal sequence whose tokens see as many keys in the mean as those of one of `length`
    tokens of which each sees the last `window` ones. The window's other end cuts through blocks as well: half
    a block more for each token, which is a block more of a causal length."""
    if window is None or window >= length:
        return length
    return min(length, 2 * window - window * window / length + BLOCK)


def attention_s(
    fitted: Mapping[str, Mapping[str, float]],
    peak_flops: float,
    flops: float,
    keys: int,
    head_dim: int,
    *,
    causal: bool,
    slowdown: float = 0.0,
) -> float:
    """Seconds of one call. `fitted`: by head size ("64") `rate`, `short` and `short_causal` of one kernel and
    direction. `slowdown`: by what share the power limit lengthens kernels that keep the tensor cores busy."""
    sizes = sorted(int(size) for size in fitted)
    below = max((size for size in sizes if size <= head_dim), default=sizes[0])
    above = min((size for size in sizes if size >= head_dim), default=sizes[-1])
    short = "short_causal" if causal else "short"
    seconds = [
        flops
        / (peak_flops * fitted[str(size)]["rate"])
        * (1 + fitted[str(size)][short] / keys)
        # a kernel that leaves half of the tensor cores idle does not bring the device to its power limit
        * (1 + (slowdown if fitted[str(size)]["rate"] >= POWER_RATE else 0.0))
        for size in (below, above)
    ]
    if below == above:
        # a head below 64 leaves more of each instruction idle: it takes as many seconds as one of 64
        return seconds[0] * max(1.0, SMALLEST / head_dim)
    share = (head_dim - below) / (above - below)
    return seconds[0] * (1 - share) + seconds[1] * share
