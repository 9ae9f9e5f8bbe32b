"""What one of several ranks gathers, copies and sends. No torch.

FSDP2 gathers a unit of weights into a flat buffer and copies it into the weights, with the next unit's buffer on
its way (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). DDP copies gradients into buckets that live
as long as the model (torch/csrc/distributed/c10d/reducer.cpp). Over a ring, an all-gather or a reduce-scatter of
M bytes sends M (N - 1) / N from each of N ranks; an all-reduce is one of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.napkin.terms import Term
from harness.napkin.weights import SIZES, BuiltModel, Weight

if TYPE_CHECKING:
    from harness.napkin.memory import Sizes


def ring(ranks: int) -> float:
    """Of the bytes of a collective over a ring, what each of `ranks` sends."""
    return (ranks - 1) / ranks


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

    @property
    def terms(self) -> list[Term]:
        section, source = "Whole for a while on every rank", "torch/distributed/fsdp/_fully_shard"
        rows = [
            ("outside the blocks", "until backward ends", self.own),
            ("a block, its buffer, and the next one's", "3 × its weights", 3 * self.block),
            ("gradients of a block", "as backward makes them, and what is reduced", self.made + self.reduced),
        ]
        return [Term(section, name, formula, size, source) for name, formula, size in rows if size]


def units_of(built: BuiltModel) -> Units:
    """FSDP2's units; empty without it."""
    recipe, ranks, layers = built.recipe, built.recipe.dp_shard, built.shape.layers
    if not recipe.fsdp:
        return Units()

    def whole(weights: Iterable[Weight], dtype: str | None = None, *, trained: bool = False) -> int:
        dtype = dtype or (recipe.compute_dtype if recipe.mixed else None)
        widths = [(w, w.total_bytes if w.quantized else w.elements * w.count * SIZES[dtype or w.dtype]) for w in weights]
        return ranks * sum(size for w, size in widths if w.trained or not trained)

    apart = recipe.head_apart and not built.shape.tied  # then the embeddings are a unit like a block
    own = [w for w in built.outer if not (apart and w.name == "embed_tokens")]
    return Units(
        whole(built.in_blocks) // layers,
        whole(built.in_blocks, trained=True) // layers,
        whole(built.in_blocks, recipe.reduce_dtype, trained=True) // layers,
        whole(own),
        whole(own, trained=True),
        whole(own, recipe.reduce_dtype, trained=True),
        layers,
        not recipe.reshard_after_forward,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one phase of one optimizer step."""

    ranks: range
    """Who sends to each other."""
    sent: float
    exposed: float
    """Of these, what the device waits for."""


def traffic(sizes: Sizes) -> dict[str, list[Traffic]]:
    """By phase what is sent: FSDP2's and DDP's under what computes, tensor parallelism's sums in its way."""
    recipe, units, shape = sizes.recipe, sizes.units, sizes.built.shape
    micro, synced, bucket_bytes = sizes.micro_batches, recipe.syncs_per_step, sizes.bucket_bytes
    forward, backward = list[Traffic](), list[Traffic]()
    among = range(0, (recipe.dp_shard if recipe.fsdp else recipe.dp_replicate) * recipe.tp, recipe.tp)
    both = 2 * ring(recipe.dp_replicate)
    if units.layers:
        share, blocks = ring(recipe.dp_shard), units.layers * units.block
        forward.append(Traffic(among, micro * share * (units.own + blocks), micro * share * units.own))
        reduces = synced * (share + both / recipe.dp_shard)
        again, made = (not units.stay) * micro * share * blocks, units.layers * units.reduced + units.own_reduced
        backward.append(Traffic(among, again + reduces * made, reduces * units.own_reduced))
    elif bucket_bytes:  # the last bucket of 25 MiB has no backward left to hide it
        last = min(bucket_bytes, 25 * 2**20)
        backward.append(Traffic(among, synced * both * bucket_bytes, synced * both * last))
    if recipe.tp > 1:  # two sums a block in each direction (Megatron-LM, arXiv 1909.08053, section 3)
        stream = recipe.micro_batch_size * recipe.seq_len * shape.hidden * SIZES[recipe.compute_dtype]
        sums = micro * shape.layers * 2 * 2 * ring(recipe.tp) * stream
        again = sums * (1 + sizes.activations.recomputes)
        forward.append(Traffic(range(recipe.tp), sums, sums))
        backward.append(Traffic(range(recipe.tp), again, again))
    return {"forward": forward, "backward": backward}
