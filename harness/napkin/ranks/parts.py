"""A rank's part of a weight. No torch.

FSDP2 divides the first dimension of a tensor by the number of ranks, rounded up: the first rank's part is the
largest, and all hold that much (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param).
What bitsandbytes keeps beside packed 4-bit values is no parameter, and whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from harness.napkin.dtypes import SIZES
from harness.napkin.model.weights import Weight
from harness.recipe import Recipe


def part_of(weight: Weight, ranks: int) -> Weight:
    """What one of `ranks` of FSDP2 holds of `weight`, and of its gradient once that is reduced."""
    weight = replace(weight, larger_gradient=0)
    if ranks == 1:
        return weight
    if weight.quantized:
        scales = weight.size_bytes - packed_bytes(weight)
        return replace(
            weight,
            size_bytes=scales + packed_part(weight, ranks),
            formula=f"{weight.formula}, the packed half byte / {ranks}",
        )
    first, rest = _dimensions(weight)
    part = -(-first // ranks)
    rows, columns = (part * rest // weight.columns, weight.columns) if weight.matrix else (1, part)
    if weight.stacked > 1:
        rows = part * rest // weight.columns
    size = part * rest * SIZES[weight.dtype]
    return replace(weight, rows=rows, columns=columns, size_bytes=size, formula=f"{weight.formula} / {ranks}")


def whole_bytes(weight: Weight, ranks: int, dtype: str | None) -> int:
    """Bytes of one tensor as it is gathered from `ranks`, padding included: in `dtype`, or its own."""
    if weight.quantized:
        return ranks * packed_part(weight, ranks)
    first, rest = _dimensions(weight)
    return ranks * -(-first // ranks) * rest * SIZES[dtype or weight.dtype]


def packed_bytes(weight: Weight) -> int:
    """Of a 4-bit weight: two values a byte, without its scales."""
    return -(-weight.elements // 2)


def packed_part(weight: Weight, ranks: int) -> int:
    """Bytes of a rank's part of those. They lie in one column of a 16-bit dtype, which FSDP2 can divide."""
    return 2 * -(-packed_bytes(weight) // (2 * ranks))


def _dimensions(weight: Weight) -> tuple[int, int]:
    """The length of the first dimension, that of stacked experts, and elements for each step of it."""
    first = weight.stacked if weight.stacked > 1 else weight.rows if weight.matrix else weight.columns
    return first, weight.elements // first


def described_mesh(recipe: Recipe) -> str:
    """`8 ranks: dp_shard 8`."""
    sizes = {name: getattr(recipe, name) for name in ("dp_replicate", "dp_shard", "tp")}
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one"
    return f"{recipe.world_size} ranks: {mesh}"
