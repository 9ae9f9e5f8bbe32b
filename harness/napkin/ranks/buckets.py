"""DDP's buckets: the second copy of the gradients that is reduced. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.napkin.model.weights import Weight

FIRST_BUCKET_BYTES = 2**20
"""torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: small, so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's bucket_cap_mb, its default."""
ROUNDING_BYTES = 512
"""The CUDA caching allocator's."""


def ddp_buckets(weights: Iterable[Weight]) -> list[int]:
    """Bytes of the buckets into which DDP's reducer copies gradients, in the order in which they are sent;
    `weights` are in the order of the forward pass.

    With gradient_as_bucket_view=False, the default, buckets are tensors of their own that live as long as the
    model: each gradient is copied in, reduced, and copied back. From the second step on they are filled in
    the order in which gradients arrive, each closed when it has reached its limit: 1 MiB for the first of a
    dtype, 25 MiB for the others (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size).
    """
    closed: list[int] = []
    filling: dict[str, int] = {}
    limits: dict[str, int] = {}
    for weight in reversed(list(weights)):
        for _ in range(weight.count):
            size = filling.get(weight.dtype, 0) + weight.size_bytes
            if size >= limits.get(weight.dtype, FIRST_BUCKET_BYTES):
                closed.append(size)
                limits[weight.dtype], size = BUCKET_BYTES, 0
            filling[weight.dtype] = size
    return closed + [size for size in filling.values() if size]


def in_forward_order(outer: Sequence[Weight], in_blocks: Sequence[Weight]) -> list[Weight]:
    """The trained weights, each block's together: embeddings, blocks, and what comes after them."""
    first = [w for w in outer if "embed" in w.name]
    layers = max((w.count for w in in_blocks), default=0)
    blocks = [replace(w, count=1) for _ in range(layers) for w in in_blocks]
    last = [w for w in reversed(outer) if w not in first]  # the norm comes before the head
    return [w for w in (*first, *blocks, *last) if w.trained]


def rounded_bytes(buckets: Iterable[int]) -> int:
    """What the buckets take of the device."""
    return sum(-(-size // ROUNDING_BYTES) * ROUNDING_BYTES for size in buckets)
