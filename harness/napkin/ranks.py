"""What one rank of several gathers, reduces and sends (torch/distributed/fsdp/_fully_shard). No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.napkin.weights import SIZES, BuiltModel, Weight


@dataclass(frozen=True)
class Units:
    """The bytes of FSDP2's units while they are gathered: an average block, and what is outside of blocks."""

    block: int = 0  # weights of a block, in the dtype in which they compute
    made: int = 0  # gradients of a block's trained weights, as backward makes them
    reduced: int = 0  # the same gradients as the input of their reduce-scatter
    own: int = 0  # these three for the unit of what is outside of blocks
    own_made: int = 0
    own_reduced: int = 0
    layers: int = 0  # the number of blocks
    stay: bool = False  # whether blocks stay gathered from forward to backward

    def gathered(self, copies: int) -> int:
        """The gathered bytes while a block is computed: what is outside, and `copies` of a block (the block
        itself, the next, and communication buffers), or all blocks where they stay."""
        return self.own + (self.layers if self.stay else copies) * self.block


def units_of(built: BuiltModel) -> Units:
    """The units of a recipe with FSDP2; zeros for any other."""
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
    """The fraction (N - 1) / N of the bytes gathered or reduced over a ring that each of N ranks sends."""
    return (ranks - 1) / ranks


def sent_bytes(built: BuiltModel, units: Units, gradient_bytes: int) -> dict[str, tuple[range, float]]:
    """By phase of a step: the ranks that communicate with each other, and the bytes that each of them sends.

    FSDP2 gathers weights and scatters gradients; DDP sums gradients, which is a scatter and a gather; tensor
    parallelism sums the residual stream twice per block in forward and in backward (Megatron-LM, arXiv
    1909.08053, section 3).
    """
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
