"""What a rank sends in one optimizer step, phase by phase, and how much of it nothing can hide. No torch.

Ring collectives: an all-gather or a reduce-scatter of M bytes over N ranks sends M (N - 1) / N from each; an
all-reduce is one of each. Those of FSDP2 and DDP overlap with what computes; those of tensor parallelism are
waited for, since the next operator reads what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.hardware import collective_s
from harness.napkin.memory.sizes import Sizes
from harness.napkin.ranks.units import Unit, Units
from harness.napkin.tape.collectives import ring


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one phase of one optimizer step."""

    link: float
    """Bytes per second."""
    sent: float = 0.0
    exposed: float = 0.0
    """Of these, what the device waits for: before the phase begins to compute, or after its end."""
    times: int = 1
    """How many passes of the phase it is sent under; the other micro batches send nothing."""


def engine_link(sizes: Sizes) -> float:
    """Bytes per second from a rank to the next among those that it gathers from, or sums with. The ranks of a
    layer are next to each other, and those of the engine so many apart."""
    recipe, apart = sizes.recipe, sizes.built.tp
    ranks = recipe.dp_shard if recipe.fsdp else recipe.dp_replicate
    return _link(sizes, range(0, ranks * apart, apart))


def layer_link(sizes: Sizes) -> float:
    """Bytes per second from a rank to the next of those that share its layers."""
    return _link(sizes, range(sizes.built.tp))


def _link(sizes: Sizes, ranks: Sequence[int]) -> float:
    whole = 10**9
    seconds = collective_s("all_gather", whole, ranks, sizes.hardware)
    return ring(len(ranks)) * whole / seconds if seconds else sizes.hardware.datasheet.gpu_link.value


def traffic(sizes: Sizes) -> dict[str, list[Traffic]]:
    """By phase, forward and backward, what each engine sends; none on one GPU."""
    engine, layers = _of_engine(sizes), _of_layers(sizes)
    return {phase: [*engine.get(phase, ()), *layers.get(phase, ())] for phase in ("forward", "backward")}


def _of_engine(sizes: Sizes) -> dict[str, list[Traffic]]:
    recipe, micro, link = sizes.recipe, sizes.micro_batches, engine_link(sizes)
    synced = recipe.syncs_per_step
    if sizes.units:
        return _of_units(sizes.units, micro, synced, link)
    if sizes.buckets:
        all_reduce = 2 * ring(recipe.dp_replicate)
        last = all_reduce * sizes.buckets[-1]  # no backward is left to hide it
        everything = synced * all_reduce * sum(sizes.buckets)
        return {"backward": [Traffic(link, everything, synced * last, synced)]}
    return {}


def _of_layers(sizes: Sizes) -> dict[str, list[Traffic]]:
    """What the ranks of a layer sum and gather, forward, backward and in what is recomputed."""
    if sizes.built.tp == 1:
        return {}
    forward = backward = 0.0
    for stage in sizes.stages.all:
        forward += stage.count * sum(op.forward_sent for op in stage.tape.ops)
        backward += stage.count * sum(op.backward_sent for op in stage.tape.ops)
        backward += stage.count * sum(op.forward_sent for op in stage.recomputed)
    micro, link = sizes.micro_batches, layer_link(sizes)
    sent = {"forward": micro * forward, "backward": micro * backward}
    return {phase: [Traffic(link, size, size, micro)] for phase, size in sent.items()}


def _of_units(units: Units, micro: int, synced: int, link: float) -> dict[str, list[Traffic]]:
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
        "forward": [Traffic(link, micro * gathered, micro * share * around, micro)],
        "backward": [Traffic(link, micro * again + synced * everything, synced * reduced(units.last), micro)],
    }
