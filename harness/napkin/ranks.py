"""What one of several ranks gathers, reduces and sends (torch/distributed/fsdp/_fully_shard). No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.napkin.weights import SIZES, BuiltModel, Weight


@dataclass(frozen=True)
class Units:
    """Bytes of FSDP2's units while they are whole: those of an average block, and of what is outside them."""

    block: int = 0  # weights, in the dtype in which they compute
    made: int = 0  # gradients of the trained ones, as backward makes them
    reduced: int = 0  # the same as the input of their reduce-scatter
    own: int = 0
    own_made: int = 0
    own_reduced: int = 0
    layers: int = 0
    stay: bool = False  # blocks stay whole from forward to backward

    def gathered(self, copies: int) -> int:
        """While a block is computed: what is outside, and `copies` of a block, itself and buffers."""
        return self.own + (self.layers if self.stay else copies) * self.block


def units_of(built: BuiltModel) -> Units:
    """FSDP2's units; empty without it."""
    recipe, ranks, layers = built.recipe, built.recipe.dp_shard, built.shape.layers
    computes = recipe.compute_dtype if recipe.mixed else None

    def whole(weights: Sequence[Weight], dtype: str | None = computes) -> int:
        plain = sum(w.elements * w.count * SIZES[dtype or w.dtype] for w in weights if not w.quantized)
        return ranks * (plain + sum(w.total_bytes for w in weights if w.quantized))

    def unit(weights: Sequence[Weight], count: int) -> tuple[int, int, int]:
        trained = [w for w in weights if w.trained]
        reduced = whole(trained, recipe.reduce_dtype or computes)
        return whole(weights) // count, whole(trained) // count, reduced // count

    apart = recipe.head_apart and not built.shape.tied  # then the embeddings are a unit like a block
    own = [w for w in built.outer if not (apart and w.name == "embed_tokens")]
    found = Units(*unit(built.in_blocks, layers), *unit(own, 1), layers, not recipe.reshard_after_forward)
    return found if recipe.fsdp else Units()


def ring(ranks: int) -> float:
    """Of M bytes that are gathered or reduced over a ring, what each of N ranks sends: (N - 1) / N."""
    return (ranks - 1) / ranks


def sent_bytes(built: BuiltModel, units: Units, gradient_bytes: int) -> dict[str, tuple[range, float]]:
    """Who sends to each other, and what each sends in a phase of a step. FSDP2 gathers weights and scatters
    gradients; DDP sums gradients, which is both; tensor parallelism sums the stream twice a block in each
    direction (Megatron-LM, arXiv 1909.08053, section 3)."""
    recipe, blocks, shard = built.recipe, units.layers * units.block, ring(built.recipe.dp_shard)
    among, copies = range(0, recipe.dp_shard * recipe.tp, recipe.tp), 2 * ring(recipe.dp_replicate)
    gathers, synced = recipe.gradient_accumulation_steps * shard, recipe.syncs_per_step
    forward, again = gathers * (units.own + blocks), (not units.stay) * gathers * blocks
    made = units.layers * units.reduced + units.own_reduced
    backward = again + synced * (shard + copies / recipe.dp_shard) * made
    if recipe.ddp:
        among, backward = range(recipe.dp_replicate), synced * copies * gradient_bytes
    stream = recipe.tokens_per_step * built.shape.hidden * SIZES[recipe.compute_dtype]
    sums = 4 * built.shape.layers * ring(recipe.tp) * stream
    among = range(recipe.tp) if sums else among
    return {"forward": (among, forward + sums), "backward": (among, backward + sums)}
