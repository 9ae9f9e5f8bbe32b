"""The largest moments of a micro batch's backward pass. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from harness.napkin.memory.liveness import Backward, StagePeak, forward_peak
from harness.napkin.memory.moment import Moment, Phase, during, in_flight_of, moment_of, repeated
from harness.napkin.memory.sizes import Sizes
from harness.napkin.ranks.units import Units
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import Op, Tensor, total_bytes


def in_backward(sizes: Sizes) -> list[Moment]:
    """The loss, each kind of block first and last in line, and the embeddings."""
    stages = sizes.stages
    below = sizes.table_bytes + stages.embedding.kept
    below += sum(s.kept_until_backward * s.count for s in stages.blocks)
    below += total_bytes(stages.kept_masks) or stages.blocks[-1].checkpointed * sizes.mask_bytes
    at_loss = below + max(0, sizes.fused_loss_bytes - stages.head.hidden.size_bytes)
    waiting = repeated([stages.embedding, *stages.blocks])
    num_blocks = len(waiting) - 1
    moments = [_in_backward(sizes, "loss", stages.loss, at_loss, 0, waiting, num_blocks)]
    made, units, index = _left_behind(sizes, stages.loss), sizes.units, num_blocks
    if units and units.tail.gradients:
        moments.append(_tail_reduced(sizes, units, below))
    for stage in reversed(stages.blocks):
        for nth in range(stage.count):
            below -= stage.kept_until_backward
            waiting.pop()
            index -= 1
            if nth in (0, units is not None, stage.count - 1):  # in between, memory changes evenly
                moments.append(_in_backward(sizes, "backward", stage, below, made, waiting, index))
            below += stage.kept_by_ctx
            made += _left_behind(sizes, stage)
    in_ctx = sizes.table_bytes + sizes.kept_by_ctx
    moments.append(_in_backward(sizes, "backward", stages.embedding, in_ctx, made, [], -1))
    if units and units.last.gradients:
        made -= 0 if units.tail.weights else _left_behind(sizes, stages.loss)
        where, gradients = "the last unit reduces its gradients", units.while_reducing(units.last)
        gradients += sizes.earlier_gradients + made
        moments.append(
            moment_of(
                sizes,
                "backward",
                where,
                gradients=gradients,
                activations=in_ctx,
                temporaries=units.last.reduced,
            )
        )
    return moments


def _tail_reduced(sizes: Sizes, units: Units, below: int) -> Moment:
    """The last norm and the head, a unit of their own, reduce their gradients before the blocks' backward."""
    entering = sizes.stages.loss.entering
    return moment_of(
        sizes,
        "backward",
        "the head's unit reduces its gradients",
        gathered_parameters=units.ahead_of_last_block(),
        gradients=sizes.earlier_gradients + units.while_reducing(units.tail),
        activations=below,
        temporaries=units.tail.reduced + (entering.size_bytes if entering else 0),
    )


def _left_behind(sizes: Sizes, stage: Stage) -> int:
    """Weight gradients that stay after a stage's backward.

    Those of offloaded blocks leave with them. The head's stays, and a tied one waits for the embeddings'.
    """
    is_loss, units = stage is sizes.stages.loss, sizes.units
    if units and (units.tail.weights or not is_loss):
        return units.left_by(units.tail if is_loss else units.block)
    if is_loss and sizes.tied_bytes:
        return sizes.tied_bytes
    leaves = sizes.recipe.parameters_on_host and not is_loss
    if leaves or sizes.optimizer.in_backward or _adds_to_earlier(sizes):
        return 0
    fused = max(0, sizes.fused_loss_bytes - sizes.stages.head.hidden.size_bytes) if is_loss else 0
    return fused + sum(op.weight_gradient_bytes for op in stage.tape.ops)


def _adds_to_earlier(sizes: Sizes) -> bool:
    """Whether backward adds into gradients of earlier micro batches, so that none stays of its own."""
    return sizes.units.accumulates if sizes.units else bool(sizes.earlier_gradients)


def _in_backward(
    sizes: Sizes, phase: Phase, stage: Stage, below: int, made: int, waiting: Sequence[Stage], index: int
) -> Moment:
    """The largest moment of a stage's backward, over what other stages keep and what later ones made.

    `index` is a block's, from the first; -1 is the embeddings', the number of blocks the loss's.
    """
    stages, optimizer = sizes.stages, sizes.optimizer
    in_flight, entering = in_flight_of(sizes, waiting), stage.input_kept
    elsewhere = [*stage.shared, *([entering] if entering else [])]
    third, share = 0, optimizer.in_backward_share
    if stage is stages.embedding and sizes.tied_bytes:
        third, share = sizes.tied_sum_bytes, 0  # a part of the sum is gone when the weight is stepped
    elif stage is stages.embedding and sizes.units and not _adds_to_earlier(sizes):
        third = sizes.units.cut_out
    peak = Backward(
        stage.tape.ops,
        elsewhere,
        accumulates=_adds_to_earlier(sizes),
        frees_weight_gradients=optimizer.in_backward,
        step_temporary=share,
        in_flight=None if entering else in_flight,
        parameters=partial(_parameters_in_backward, sizes, stage, index),
        compiled=stage.tape.compiled,
    ).run()
    where = f"{stage.name}, {during(peak)}"
    again = 0  # bytes of what a ctx keeps since forward that recomputing makes a second time
    if in_flight:
        below = sizes.kept_by_ctx - stage.kept_by_ctx
        below += sum(in_flight.before) if entering else 0
    if entering:  # kept since forward, and the whole block is computed again from it
        below += entering.size_bytes
        again, second = stage.kept_twice, _recomputing(sizes, stage, index, elsewhere)
        if second.size_bytes + stage.kept_by_ctx > peak.size_bytes + again:
            peak, again, where = second, stage.kept_by_ctx, f"{stage.name}, {during(second)} again"
    units = sizes.units
    return moment_of(
        sizes,
        phase,
        where,
        parameters=sizes.device_parameters() if units else peak.parameters,
        gathered_parameters=peak.parameters if units else 0,
        gradients=sizes.earlier_gradients + made + peak.weight_gradients,
        activations=below + again + peak.kept,
        temporaries=peak.gradients + peak.temporaries + third + (units.being_reduced(index) if units else 0),
    )


def _parameters_in_backward(sizes: Sizes, stage: Stage, index: int, op: Op | None) -> int:
    """Parameters on the device, or with units those that are whole: backward meets the loss, the head, the
    final norm, the blocks."""
    if sizes.units:
        return sizes.units.in_backward(index) if _reached(sizes, stage, op) else sizes.units.after_forward()
    if stage in sizes.stages.blocks:
        return sizes.device_parameters(block=True, expected=True)
    if stage is sizes.stages.embedding:
        return sizes.device_parameters()
    head, reached = bool(sizes.stages.head.head), _reached(sizes, stage, op)
    return sizes.device_parameters(head=head and reached, expected=reached)


def _reached(sizes: Sizes, stage: Stage, op: Op | None) -> bool:
    """Whether backward has reached the weights of `stage`: those of the loss with the head, but for the unit
    that is the whole model's."""
    ops, head = stage.tape.ops, sizes.stages.head.head
    own = sizes.units is not None and not sizes.recipe.head_apart
    if own or stage is not sizes.stages.loss or not head:
        return True
    return op is not None and ops.index(op) <= ops.index(head[-1])


def _recomputing(sizes: Sizes, stage: Stage, index: int, elsewhere: list[Tensor]) -> StagePeak:
    """The peak of a block's second forward pass, when the gradient of its output is there already."""
    again = forward_peak(stage.tape.ops, elsewhere)
    waiting = stage.tape.ops[-1].outputs[0].size_bytes
    parameters = _parameters_in_backward(sizes, stage, index, again.op)
    return replace(again, gradients=waiting, parameters=parameters)
