"""What one of several ranks gathers, reduces and sends. No torch.

FSDP2 gathers a unit of weights into a flat buffer and copies it into the weights, with the next unit's buffer
on its way (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.napkin.weights import SIZES, BuiltModel, Weight


@dataclass(frozen=True)
class Units:
    """Bytes of FSDP2's units while they are whole: those of an average block, and of what is outside them."""

    block: int = 0
    """Weights, in the dtype in which they compute."""
    made: int = 0
    """Gradients of the trained ones, as backward makes them."""
    reduced: int = 0
    """The same as the input of their reduce-scatter."""
    own: int = 0
    own_made: int = 0
    own_reduced: int = 0
    layers: int = 0
    stay: bool = False
    """Blocks stay whole from forward to backward."""

    def gathered(self, copies: int) -> int:
        """While a block is computed: what is outside, and `copies` of a block, itself and buffers."""
        return self.own + (self.layers if self.stay else copies) * self.block


def units_of(built: BuiltModel) -> Units:
    """FSDP2's units; empty without it."""
    recipe, ranks, layers = built.recipe, built.recipe.dp_shard, built.shape.layers
    computes = recipe.compute_dtype if recipe.mixed else None

    def whole(weights: Iterable[Weight], dtype: str | None = computes) -> int:
        widths = ((w, w.elements * w.count * SIZES[dtype or w.dtype]) for w in weights if not w.quantized)
        return ranks * (sum(size for _, size in widths) + sum(w.total_bytes for w in weights if w.quantized))

    if not recipe.fsdp:
        return Units()
    apart = recipe.head_apart and not built.shape.tied  # then the embeddings are a unit like a block
    own = [w for w in built.outer if not (apart and w.name == "embed_tokens")]
    sizes: list[int] = []
    for weights, count in ((built.in_blocks, layers), (own, 1)):
        trained = [w for w in weights if w.trained]
        reduced = whole(trained, recipe.reduce_dtype or computes)
        sizes += [size // count for size in (whole(weights), whole(trained), reduced)]
    return Units(*sizes, layers, not recipe.reshard_after_forward)


def ring(ranks: int) -> float:
    """Of M bytes that are gathered or reduced over a ring, what each of N ranks sends: (N - 1) / N."""
    return (ranks - 1) / ranks


def sent_bytes(built: BuiltModel, units: Units, gradient_bytes: int) -> dict[str, tuple[range, float, float]]:
    """Who sends to each other, what each sends in a phase of a step, and what of it nothing computes under.

    FSDP2 gathers weights (the first unit's show) and scatters gradients (the last's); DDP sums gradients, which
    is both (the last bucket of 25 MiB shows); tensor parallelism sums the stream twice a block in each direction,
    in the way (Megatron-LM, arXiv 1909.08053, section 3).
    """
    recipe, blocks, stream = built.recipe, units.layers * units.block, SIZES[built.recipe.compute_dtype]
    among, copies = range(0, recipe.dp_shard * recipe.tp, recipe.tp), 2 * ring(recipe.dp_replicate)
    synced, gathers = recipe.syncs_per_step, recipe.gradient_accumulation_steps * ring(recipe.dp_shard)
    reduces = synced * (ring(recipe.dp_shard) + copies / recipe.dp_shard)
    forward, first = gathers * (units.own + blocks), gathers * units.own
    again, made = (not units.stay) * gathers * blocks, units.layers * units.reduced + units.own_reduced
    backward, last = again + reduces * made, reduces * units.own_reduced
    if recipe.ddp:
        among, bucket = range(recipe.dp_replicate), min(gradient_bytes, 25 * 2**20)
        backward, last = synced * copies * gradient_bytes, synced * copies * bucket
    sums = 4 * built.shape.layers * ring(recipe.tp) * recipe.tokens_per_step * built.shape.hidden * stream
    among = range(recipe.tp) if sums else among
    return {
        "forward": (among, forward + sums, first + sums),
        "backward": (among, backward + sums, last + sums),
    }
