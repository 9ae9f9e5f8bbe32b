"""Device memory through one steady optimizer step: every phase's largest moment, and the peak. No torch.

"Steady" is from the second step on: the optimizer's state exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from harness.hardware import Hardware
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.liveness import Backward, InFlight, StagePeak, forward_peak
from harness.napkin.memory.sizes import Sizes
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import Op, Tensor, saved_storages, total_bytes


def required_bytes(memory: Memory) -> int:
    """What must fit on the device: the peak and the CUDA context. Fragmentation comes on top."""
    return memory.peak.total_bytes + memory.sizes.hardware.calibration.cuda_context_bytes


IN_FLIGHT = 2
"""Offloaded activations on their way out, or fetched ahead (training/toggles/offload_activations.py)."""


Phase = Literal["setup", "forward", "loss", "backward", "optimizer_step"]
"""`loss` is the first piece of backward."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive on the device at one moment, by what they are."""

    phase: Phase
    where: str
    """For people alone."""
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0
    inputs: int = 0
    other: int = 0

    @property
    def total_bytes(self) -> int:
        held = self.parameters + self.gradients + self.optimizer_state
        return held + self.activations + self.temporaries + self.inputs + self.other


@dataclass(frozen=True)
class Memory:
    """The sizes of a recipe's step, and the moments that can be its peak, in order."""

    sizes: Sizes

    @cached_property
    def moments(self) -> list[Moment]:
        sizes = self.sizes
        return [_after_setup(sizes), *_forward(sizes), *_backward(sizes), _step(sizes)]

    @property
    def peak(self) -> Moment:
        """The largest moment of the step; setup is not part of it."""
        return max(self.moments[1:], key=lambda moment: moment.total_bytes)


def memory_of(built: BuiltModel, hardware: Hardware) -> Memory:
    """The memory of a recipe on a device. Raises InputError for what cannot be built."""
    return Memory(Sizes(built, hardware))


def _moment(sizes: Sizes, phase: Phase, where: str, **parts: int) -> Moment:
    """A moment of the step: `parts`, and what is there throughout."""
    settled = {
        "parameters": sizes.device_parameters(),
        "optimizer_state": sizes.device_state,
        "inputs": sizes.input_bytes,
        "other": sizes.hardware.cublas_workspace_bytes,
    }
    return Moment(phase=phase, where=where, **settled | parts)


def _after_setup(sizes: Sizes) -> Moment:
    copies = 0 if sizes.optimizer.on_host else sizes.optimizer.copy_bytes
    held = sizes.device_parameters()
    return Moment(phase="setup", where="model and optimizer built", parameters=held, optimizer_state=copies)


def _forward(sizes: Sizes) -> list[Moment]:
    stages, before = sizes.stages, sizes.earlier_gradients
    last = stages.blocks[-1]
    in_block = _stage_forward(sizes, last, _repeated(stages.blocks)[:-1])
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
    return [
        _moment(
            sizes,
            "forward",
            "embedding",
            parameters=sizes.device_parameters(outer=True, expected=True),
            gradients=before,
        ),
        _moment(
            sizes,
            "forward",
            f"last block, {_during(in_block)}",
            parameters=sizes.device_parameters(head=True, block=True, expected=True),
            gradients=before,
            activations=earlier + in_block.kept,
            temporaries=in_block.temporaries + sizes.mask_bytes + sizes.cached_casts(stages.blocks),
        ),
        _moment(
            sizes,
            "forward",
            f"loss, {_during(loss)}",
            parameters=sizes.device_parameters(head=True),
            gradients=before,
            activations=_resident_at_loss(sizes),
            temporaries=_loss_locals(sizes) + fused + masks + sizes.cached_casts(stages.all),
        ),
    ]


def _repeated(stages: Sequence[Stage]) -> list[Stage]:
    """Each stage as many times as it is there."""
    return [stage for stage in stages for _ in range(stage.count)]


def _in_flight(sizes: Sizes, before: Sequence[Stage]) -> InFlight | None:
    """What offloaded activations have on the device, after or below the stages `before`."""
    if not sizes.recipe.activations_on_host:
        return None
    saved = [t.size_bytes for stage in reversed(before) for t in reversed(stage.saved)]
    return InFlight(IN_FLIGHT, saved[:IN_FLIGHT])


def _stage_forward(sizes: Sizes, stage: Stage, before: Sequence[Stage]) -> StagePeak:
    """The peak of a block's forward pass; a checkpointed block's input is counted apart."""
    in_flight = _in_flight(sizes, before)
    apart = stage.tape.cached if sizes.cached_casts([stage]) else []
    elsewhere = [*stage.shared, *apart, *([stage.input_kept] if stage.input_kept else [])]
    peak = forward_peak(
        stage.tape.ops, elsewhere, entering=stage.entering, keeps=not stage.checkpointed, in_flight=in_flight
    )
    if in_flight and stage.checkpointed:  # its own input is one of those in flight
        peak = replace(peak, kept=peak.kept + sum(in_flight.before[: IN_FLIGHT - 1]))
    return peak


def _during(peak: StagePeak) -> str:
    return peak.op.name if peak.op else ""


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
    leaving = saved_storages([op for op in ops[:-1] if op.outputs[0] is not result])[-IN_FLIGHT:]
    apart = [sizes.stages.head.hidden.storage, *sizes.stages.loss.tape.cached]
    leaving = [t for t in leaving if not any(t is other for other in apart)]
    return total_bytes([result, *leaving]) + sizes.fused_loss_bytes + sizes.kept_by_ctx


def _backward(sizes: Sizes) -> list[Moment]:
    """The loss, each kind of block first and last in line, and the embeddings."""
    stages = sizes.stages
    below = sizes.table_bytes + stages.embedding.kept
    below += sum(s.kept_until_backward * s.count for s in stages.blocks)
    below += total_bytes(stages.kept_masks) or stages.blocks[-1].checkpointed * sizes.mask_bytes
    at_loss = below + max(0, sizes.fused_loss_bytes - stages.head.hidden.size_bytes)
    waiting = _repeated([stages.embedding, *stages.blocks])
    moments = [_in_backward(sizes, "loss", stages.loss, at_loss, 0, waiting)]
    made = _left_behind(sizes, stages.loss)
    for stage in reversed(stages.blocks):
        for index in range(stage.count):
            below -= stage.kept_until_backward
            waiting.pop()
            if index in (0, stage.count - 1):  # in between, memory changes evenly
                moments.append(_in_backward(sizes, "backward", stage, below, made, waiting))
            below += stage.kept_by_ctx
            made += _left_behind(sizes, stage)
    in_ctx = sizes.table_bytes + sizes.kept_by_ctx
    return [*moments, _in_backward(sizes, "backward", stages.embedding, in_ctx, made, [])]


def _left_behind(sizes: Sizes, stage: Stage) -> int:
    """Weight gradients that stay after a stage's backward.

    Those of offloaded blocks leave with them. The head's stays, and a tied one waits for the embeddings'.
    """
    is_loss = stage is sizes.stages.loss
    if is_loss and sizes.tied_bytes:
        return sizes.tied_bytes
    leaves = sizes.recipe.parameters_on_host and not is_loss
    if leaves or sizes.optimizer.in_backward or sizes.earlier_gradients:
        return 0
    fused = max(0, sizes.fused_loss_bytes - sizes.stages.head.hidden.size_bytes) if is_loss else 0
    return fused + sum(op.weight_gradient_bytes for op in stage.tape.ops)


def _in_backward(
    sizes: Sizes, phase: Phase, stage: Stage, below: int, made: int, waiting: Sequence[Stage]
) -> Moment:
    """The largest moment of a stage's backward, over what other stages keep and what later ones made."""
    stages, optimizer = sizes.stages, sizes.optimizer
    in_flight, entering = _in_flight(sizes, waiting), stage.input_kept
    elsewhere = [*stage.shared, *([entering] if entering else [])]
    third, share = 0, optimizer.in_backward_share
    if stage is stages.embedding and sizes.tied_bytes:
        third, share = sizes.tied_sum_bytes, 0  # a part of the sum is gone when the weight is stepped
    peak = Backward(
        stage.tape.ops,
        elsewhere,
        accumulates=bool(sizes.earlier_gradients),
        frees_weight_gradients=optimizer.in_backward,
        step_temporary=share,
        in_flight=None if entering else in_flight,
        parameters=partial(_parameters_in_backward, sizes, stage),
        compiled=stage.tape.compiled,
    ).run()
    where = f"{stage.name}, {_during(peak)}"
    again = 0  # bytes of what a ctx keeps since forward that recomputing makes a second time
    if in_flight:
        below = sizes.kept_by_ctx - stage.kept_by_ctx
        below += sum(in_flight.before) if entering else 0
    if entering:  # kept since forward, and the whole block is computed again from it
        below += entering.size_bytes
        again, second = stage.kept_twice, _recomputing(sizes, stage, elsewhere)
        if second.size_bytes + stage.kept_by_ctx > peak.size_bytes + again:
            peak, again, where = second, stage.kept_by_ctx, f"{stage.name}, {_during(second)} again"
    return _moment(
        sizes,
        phase,
        where,
        parameters=peak.parameters,
        gradients=sizes.earlier_gradients + made + peak.weight_gradients,
        activations=below + again + peak.kept,
        temporaries=peak.gradients + peak.temporaries + third,
    )


def _parameters_in_backward(sizes: Sizes, stage: Stage, op: Op | None) -> int:
    """Parameters on the device: backward meets the loss, the head, the final norm, the blocks."""
    if stage in sizes.stages.blocks:
        return sizes.device_parameters(block=True, expected=True)
    if stage is sizes.stages.embedding:
        return sizes.device_parameters()
    ops, head = stage.tape.ops, sizes.stages.head.head
    reached = not head or (op is not None and ops.index(op) <= ops.index(head[-1]))
    return sizes.device_parameters(head=bool(head) and reached, expected=reached)


def _recomputing(sizes: Sizes, stage: Stage, elsewhere: list[Tensor]) -> StagePeak:
    """The peak of a block's second forward pass, when the gradient of its output is there already."""
    again = forward_peak(stage.tape.ops, elsewhere)
    waiting = stage.tape.ops[-1].outputs[0].size_bytes
    parameters = _parameters_in_backward(sizes, stage, again.op)
    return replace(again, gradients=waiting, parameters=parameters)


def _step(sizes: Sizes) -> Moment:
    optimizer, gradients = sizes.optimizer, sizes.gradient_bytes
    if optimizer.in_backward:
        return _moment(sizes, "optimizer_step", "done in backward")
    if optimizer.on_host:
        held = 0 if sizes.recipe.parameters_on_host else gradients
        return _moment(sizes, "optimizer_step", "gradients leave for the host", gradients=held)
    if optimizer.gradient_dtype:
        gradients = sum(w.count * w.elements for w in sizes.trained) * SIZES[optimizer.gradient_dtype]
    temporaries = optimizer.step_temporary_bytes
    return _moment(sizes, "optimizer_step", "update", gradients=gradients, temporaries=temporaries)
