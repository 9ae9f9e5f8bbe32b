"""What a rank sends in one optimizer step, phase by phase, and how much of it nothing can hide. No torch.

Ring collectives: an all-gather or a reduce-scatter of M bytes over N ranks sends M (N - 1) / N from each; an
all-reduce is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.hardware import collective_s
from harness.napkin.memory.sizes import Sizes
from harness.napkin.ranks.units import Unit, Units


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one phase of one optimizer step."""

    sent: float = 0.0
    exposed: float = 0.0
    """Of these, what the device waits for: before the phase begins to compute, or after its end."""
    times: int = 1
    """How many passes of the phase it is sent under; the other micro batches send nothing."""


def ring(ranks: int) -> float:
    """Share of a buffer that each of `ranks` sends in a ring all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def link_rate(sizes: Sizes) -> float:
    """Bytes per second from a rank to the next among those that it gathers from, or sums with."""
    recipe, whole = sizes.recipe, 10**9
    ranks = recipe.dp_shard if recipe.fsdp else recipe.dp_replicate
    seconds = collective_s("all_gather", whole, range(ranks), sizes.hardware)
    return ring(ranks) * whole / seconds if seconds else sizes.hardware.datasheet.gpu_link.value


def traffic(sizes: Sizes) -> dict[str, Traffic]:
    """By phase, forward and backward; empty on one GPU."""
    recipe, micro = sizes.recipe, sizes.micro_batches
    synced = recipe.syncs_per_step
    if sizes.units:
        return _of_units(sizes.units, micro, synced)
    if sizes.buckets:
        all_reduce = 2 * ring(recipe.dp_replicate)
        last = all_reduce * sizes.buckets[-1]  # no backward is left to hide it
        return {"backward": Traffic(synced * all_reduce * sum(sizes.buckets), synced * last, synced)}
    return {}


def _of_units(units: Units, micro: int, synced: int) -> dict[str, Traffic]:
    """Units are gathered in each forward, and again in backward unless they stayed; gradients are scattered.

    A unit is gathered while the one before computes, so the first gather of a forward shows, and so does the
    last reduction. Of hybrid sharding, a rank's part is then summed over the groups.
    """
    recipe, share = units.recipe, ring(units.recipe.dp_shard)
    groups = 2 * ring(recipe.dp_replicate) / recipe.dp_shard

    def reduced(unit: Unit) -> float:
        return (share + groups) * unit.reduced

    blocks, around = units.layers * units.block.weights, units.own.weights + units.embeddings.weights
    gathered = share * (blocks + around + units.tail.weights)
    again = 0.0 if units.kept else share * (blocks + units.embeddings.weights)
    everything = sum(reduced(unit) for unit in (units.own, units.embeddings, units.tail))
    everything += units.layers * reduced(units.block)
    return {
        "forward": Traffic(micro * gathered, micro * share * around, micro),
        "backward": Traffic(micro * again + synced * everything, synced * reduced(units.last), micro),
    }
