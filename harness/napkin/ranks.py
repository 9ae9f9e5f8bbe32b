"""What one of several ranks gathers, copies and sends. No torch.

FSDP2 gathers a unit of weights into a flat buffer and copies it into the weights, with the next unit's buffer on
its way (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). DDP copies gradients into buckets that live
as long as the model (torch/csrc/distributed/c10d/reducer.cpp). Ring collectives: an all-gather or a
reduce-scatter of M bytes over N ranks sends M (N - 1) / N from each; an all-reduce is one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.napkin.terms import Term
from harness.napkin.weights import SIZES, BuiltModel, Weight
from harness.recipe import Recipe

FSDP = "torch/distributed/fsdp/_fully_shard"
SECTION = "Whole for a while on every rank"


def ring(ranks: int) -> float:
    """Of the bytes of a collective over a ring, what each of `ranks` sends."""
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Units:
    """Bytes of FSDP2's units when they are whole, and of what it holds beside a rank's parts."""

    block: int
    """Weights of the largest block, in the dtype in which they compute."""
    own: int
    """Of what is outside the blocks: gathered before the first, whole until backward ends."""
    gradients: int
    """Of a block's trained weights, as backward makes them; and again as the input of their reduction."""
    all_blocks: int
    """Weights of all blocks."""
    own_gradients: int
    accumulated: int
    """Gradients of whole weights, of earlier micro batches that were not reduced."""
    kept: bool
    """Units stay whole from forward to backward."""

    @property
    def forward(self) -> int:
        """While a block runs: it, its buffer, and the next one's."""
        return self.own + (self.all_blocks if self.kept else 3 * self.block)

    @property
    def backward(self) -> int:
        """A block and the buffer of the one before it."""
        return self.own + (self.all_blocks if self.kept else 2 * self.block)

    @property
    def terms(self) -> list[Term]:
        rows = [
            ("outside the blocks", "until backward ends", self.own),
            ("a block, and the buffers of two", "3 × its weights", 3 * self.block),
            ("gradients of a block, and what is reduced", "before a rank keeps its part", 2 * self.gradients),
            ("unsynced gradients", "of earlier micro batches, whole", self.accumulated),
        ]
        return [Term(SECTION, name, formula, size, FSDP) for name, formula, size in rows if size]


def units_of(built: BuiltModel) -> Units | None:
    """FSDP2's units; None without it."""
    recipe = built.recipe
    if not recipe.fsdp:
        return None
    ranks, layers = recipe.dp_shard, built.whole.layers
    reduced = SIZES[recipe.reduce_dtype] if recipe.reduce_dtype else 0

    def whole(weights: Sequence[Weight]) -> int:
        return sum(ranks * (w.elements * w.count * _width(recipe, w) if not w.quantized else w.total_bytes) for w in weights)

    def made(weights: Sequence[Weight]) -> int:
        return sum(ranks * w.elements * w.count * max(_width(recipe, w), reduced) for w in weights if w.trained)

    blocks, outer = built.in_blocks, built.outer
    own = outer
    if recipe.head_apart and not built.whole.tied:  # the embeddings are gathered and freed as blocks are
        own = [w for w in outer if w.name != "embed_tokens"]
    once = recipe.syncs_per_step < recipe.gradient_accumulation_steps
    return Units(
        block=whole(blocks) // layers,
        own=whole(own),
        gradients=made(blocks) // layers,
        all_blocks=whole(blocks),
        own_gradients=made(outer),
        accumulated=made([*blocks, *outer]) if once else 0,
        kept=not recipe.reshard_after_forward,
    )


def _width(recipe: Recipe, weight: Weight) -> int:
    """Bytes of an element as it is gathered: a mixed precision's, else the weight's own."""
    return SIZES[recipe.compute_dtype if recipe.mixed else weight.dtype]


def bucket_bytes(built: BuiltModel) -> int:
    """DDP's second copy of the gradients (gradient_as_bucket_view=False, its default)."""
    return sum(w.elements * w.count * SIZES[w.dtype] for w in built.trained) if built.recipe.ddp else 0


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one phase of one optimizer step."""

    ranks: Sequence[int]
    """Who sends to each other."""
    sent: float
    exposed: float
    """Of these, what the device waits for."""
    times: int
    """How many passes of the phase it is sent under."""


def traffic(built: BuiltModel) -> dict[str, list[Traffic]]:
    """By phase what is sent: FSDP2's and DDP's under what computes, tensor parallelism's sums in its way."""
    recipe, phases = built.recipe, {"forward": list[Traffic](), "backward": list[Traffic]()}
    micro, synced, units = recipe.gradient_accumulation_steps, recipe.syncs_per_step, units_of(built)
    of_engine = range(0, (recipe.dp_shard if units else recipe.dp_replicate) * recipe.tp, recipe.tp)
    if units:
        share = ring(recipe.dp_shard)
        gathered = share * (units.own + units.all_blocks)
        groups = 2 * ring(recipe.dp_replicate) / recipe.dp_shard
        reduced = (share + groups) * (units.gradients * built.whole.layers + units.own_gradients)
        again = 0.0 if units.kept else share * units.all_blocks
        phases["forward"].append(Traffic(of_engine, micro * gathered, micro * share * units.own, micro))
        last = synced * (share + groups) * units.own_gradients
        phases["backward"].append(Traffic(of_engine, micro * again + synced * reduced, last, synced))
    elif copied := bucket_bytes(built):
        all_reduce = 2 * ring(recipe.dp_replicate) * copied
        exposed = min(all_reduce, 2 * ring(recipe.dp_replicate) * 25 * 2**20)  # the last bucket
        phases["backward"].append(Traffic(of_engine, synced * all_reduce, synced * exposed, synced))
    if recipe.tp > 1:  # two sums a block in each direction (Megatron-LM, arXiv 1909.08053, section 3)
        stream = recipe.micro_batch_size * recipe.seq_len * built.whole.hidden * SIZES[recipe.compute_dtype]
        size = micro * built.whole.layers * 2 * 2 * ring(recipe.tp) * stream
        for phase in phases:
            times = 2 if phase == "backward" and recipe.gradient_checkpointing else 1
            phases[phase].append(Traffic(range(recipe.tp), times * size, times * size, micro))
    return phases


def described_mesh(recipe: Recipe) -> str:
    """`8 ranks: dp_shard 8`."""
    sizes = {name: getattr(recipe, name) for name in ("dp_replicate", "dp_shard", "tp")}
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one"
    return f"{recipe.world_size} ranks: {mesh}"
