"""The largest moments of a micro batch's forward pass. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from harness.napkin.memory.in_flight import IN_FLIGHT, offloaded
from harness.napkin.memory.liveness import StagePeak, forward_peak
from harness.napkin.memory.moment import Moment, during, in_flight_of, moment_of, repeated
from harness.napkin.memory.sizes import Sizes
from harness.napkin.ranks.units import Units
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import saved_storages, total_bytes


def in_forward(sizes: Sizes) -> list[Moment]:
    stages, before = sizes.stages, sizes.earlier_gradients
    last = stages.blocks[-1]
    in_block = _stage_forward(sizes, last, repeated(stages.blocks)[:-1])
    if sizes.recipe.activations_on_host:
        earlier = sizes.kept_by_ctx - last.kept_by_ctx
    else:
        earlier = sizes.table_bytes + stages.embedding.kept - last.kept_until_backward
        earlier += sum(s.kept_until_backward * s.count for s in stages.blocks)
    if last.input_kept:
        earlier += last.input_kept.size_bytes
    loss = forward_peak(stages.loss.tape.ops)
    # without checkpointing they are gone with the blocks' frame
    masks = sizes.mask_bytes if last.checkpointed and not stages.kept_masks else 0
    fused = stages.head.fused.temporary_bytes if stages.head.fused else 0
    units = sizes.units
    return [
        *(_copied(sizes, units, earlier) if units else []),
        moment_of(
            sizes,
            "forward",
            "embedding",
            parameters=sizes.device_parameters(outer=True, expected=True),
            gathered_parameters=units.after_embeddings() if units else 0,
            gradients=before,
        ),
        moment_of(
            sizes,
            "forward",
            f"last block, {during(in_block)}",
            parameters=sizes.device_parameters(head=True, block=True, expected=True),
            gathered_parameters=units.in_block() if units else 0,
            gradients=before,
            activations=earlier + in_block.kept,
            temporaries=in_block.temporaries + sizes.mask_bytes + sizes.cached_casts(stages.blocks),
        ),
        moment_of(
            sizes,
            "forward",
            f"loss, {during(loss)}",
            parameters=sizes.device_parameters(head=True),
            gathered_parameters=units.at_loss() if units else 0,
            gradients=before,
            activations=_resident_at_loss(sizes),
            temporaries=_loss_locals(sizes) + fused + masks + sizes.cached_casts(stages.all),
        ),
    ]


def _copied(sizes: Sizes, units: Units, earlier: int) -> list[Moment]:
    """While the weights of the last block, and of a last unit, are copied out of their buffers."""
    stages, before = sizes.stages, sizes.earlier_gradients
    last, loss = stages.blocks[-1], stages.loss
    at = partial(moment_of, sizes, "forward", gradients=before)
    stream = last.entering.size_bytes if last.entering and not last.input_kept else 0
    moments = [
        at(
            "a block is gathered",
            gathered_parameters=units.before_block(),
            activations=earlier,
            temporaries=stream,
        )
    ]
    if units.tail.weights:
        kept = earlier - (last.input_kept.size_bytes if last.input_kept else 0) + last.kept_until_backward
        stream = loss.entering.size_bytes if loss.entering else 0
        where, gathered = "the head is gathered", units.before_tail()
        moments.append(at(where, gathered_parameters=gathered, activations=kept, temporaries=stream))
    return moments


def _stage_forward(sizes: Sizes, stage: Stage, before: Sequence[Stage]) -> StagePeak:
    """The peak of a block's forward pass; a checkpointed block's input is counted apart."""
    in_flight = in_flight_of(sizes, before)
    apart = stage.tape.cached if sizes.cached_casts([stage]) else []
    elsewhere = [*stage.shared, *apart, *([stage.input_kept] if stage.input_kept else [])]
    peak = forward_peak(
        stage.tape.ops, elsewhere, entering=stage.entering, keeps=not stage.checkpointed, in_flight=in_flight
    )
    if in_flight and stage.checkpointed:  # its own input is one of those in flight
        peak = replace(peak, kept=peak.kept + sum(in_flight.before[: IN_FLIGHT - 1]))
    return peak


def _loss_locals(sizes: Sizes) -> int:
    """What the loss holds at its end, and backward does not need."""
    stages = sizes.stages
    kept: set[int] = set() if sizes.recipe.activations_on_host else {id(t) for t in stages.loss.kept_tensors}
    # a compiled model never makes what it fuses
    return sum(t.size_bytes for t in stages.head.held if id(t.storage) not in kept and not t.sources)


def _resident_at_loss(sizes: Sizes) -> int:
    """Kept bytes on the device when the loss is there: with offload, what it was just computed from, and
    what is still on its way out."""
    if not sizes.recipe.activations_on_host:
        return sizes.kept_in_forward
    ops, result = sizes.stages.loss.tape.ops, sizes.stages.loss.tape.ops[-1].inputs[0]
    saved = saved_storages([op for op in ops[:-1] if op.outputs[0] is not result])
    leaving = offloaded(saved)[-IN_FLIGHT:]
    apart = [sizes.stages.head.hidden.storage, *sizes.stages.loss.tape.cached]
    leaving = [t for t in leaving if not any(t is other for other in apart)]
    return total_bytes([result, *leaving]) + sizes.fused_loss_bytes + sizes.kept_by_ctx
