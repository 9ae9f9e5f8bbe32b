"""DeepSpeed's buffers beside the model states, from what its configuration documents. No torch.

Sizes are in elements of the gradients' or weights' dtype (DeepSpeed@1b88ac3, runtime/zero/config.py: the
defaults and what each limits). Where they live: stage_1_and_2.py makes a bucket before each backward, and a
second one with overlap_comm, which is off by default below stage 3; stage3.py keeps one from the start, and
releases gathered parameters when more than stage3_max_live_parameters are live.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.napkin import Sizes

REDUCE_BUCKET_SIZE = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
PREFETCH_BUCKET_SIZE = 50_000_000


class Buffer(NamedTuple):
    """Bytes that DeepSpeed holds, and how they come about."""

    name: str
    formula: str
    size_bytes: int


def zero_buffers(sizes: Sizes, strategy: str) -> list[Buffer]:
    """The buffers of a ZeRO stage at its defaults, alive at the same time in backward; none for others."""
    if strategy not in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
        return []
    trained = sum(w.elements * w.count for w in sizes.trained)
    of_gradient = sizes.gradient_bytes // trained if trained else 0
    bucket = Buffer(
        "reduce_bucket_size",
        f"{REDUCE_BUCKET_SIZE:,} × {of_gradient} B",
        REDUCE_BUCKET_SIZE * of_gradient,
    )
    if strategy != "ZeRO-3":
        return [bucket]
    weights = [*sizes.outer, *sizes.in_blocks]
    elements = sum(w.elements * w.count for w in weights)
    of_weight = sum(w.total_bytes for w in weights) / elements
    live = min(elements, MAX_LIVE_PARAMETERS + PREFETCH_BUCKET_SIZE)
    limit = f"stage3_max_live_parameters + prefetch = {MAX_LIVE_PARAMETERS + PREFETCH_BUCKET_SIZE:,}"
    at_most = f"min({elements:,}, {limit}) × {of_weight:.3g} B"
    return [bucket, Buffer("live parameters", at_most, int(live * of_weight))]
