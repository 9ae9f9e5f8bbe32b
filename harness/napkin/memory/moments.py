"""Device memory through one steady optimizer step: every phase's largest moment, and the peak. No torch.

"Steady" is from the second step on: the optimizer's state exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from harness.hardware import Hardware
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.liveness import Backward, Moment, forward_peak
from harness.napkin.memory.sizes import Sizes
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import saved_storages, total_bytes


def required_bytes(memory: Memory) -> int:
    """What must fit on the device: the peak and the CUDA context. Fragmentation comes on top."""
    return memory.peak.total_bytes + memory.sizes.hardware.calibration.cuda_context_bytes


IN_FLIGHT = 2
"""Offloaded activations on their way out, or fetched ahead (training/toggles/offload_activations.py)."""


@dataclass(frozen=True)
class Snapshot:
    """Bytes alive on the device at one moment, by what they are."""

    phase: str
    """setup, forward, loss (the first of backward), backward or optimizer_step."""
    where: str
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
    def snapshots(self) -> list[Snapshot]:
        sizes = self.sizes
        return [_after_setup(sizes), *_forward(sizes), *_backward(sizes), _step(sizes)]

    @property
    def peak(self) -> Snapshot:
        """The largest moment of the step; setup is not part of it."""
        return max(self.snapshots[1:], key=lambda s: s.total_bytes)


def memory_of(built: BuiltModel, hardware: Hardware) -> Memory:
    """The memory of a recipe on a device. Raises InputError for what cannot be built."""
    return Memory(Sizes(built, hardware))


def _moment(sizes: Sizes, phase: str, where: str, parameters_of: str = "", **parts: int) -> Snapshot:
    settled = {
        "parameters": sizes.device_parameters(parameters_of or phase),
        "optimizer_state": sizes.device_state,
        "inputs": sizes.input_bytes,
        "other": sizes.hardware.cublas_workspace_bytes,
    }
    return Snapshot(phase, where, **settled | parts)


def _after_setup(sizes: Sizes) -> Snapshot:
    copies = 0 if sizes.optimizer.on_host else sizes.optimizer.copy_bytes
    held = sizes.device_parameters("setup")
    return Snapshot("setup", "model and optimizer built", held, optimizer_state=copies)


def _forward(sizes: Sizes) -> list[Snapshot]:
    stages, before = sizes.stages, sizes.earlier_gradients
    last = stages.blocks[-1]
    recomputes = sizes.recipe.gradient_checkpointing
    earlier = sizes.table_bytes + stages.embedding.kept - sizes.block_kept(last)
    earlier += sum(sizes.block_kept(s) * s.count for s in stages.blocks)
    in_block = forward_peak(last.tape.ops, last.shared, keeps=not recomputes)
    loss = forward_peak(stages.loss.tape.ops)
    # without checkpointing they are gone with the blocks' frame
    masks = sizes.mask_bytes if recomputes and not sizes.kept_mask_bytes else 0
    return [
        _moment(sizes, "forward", "embedding", "embedding", gradients=before),
        _moment(
            sizes,
            "forward",
            f"last block, {in_block.where}",
            gradients=before,
            activations=_resident(sizes, earlier, sizes.pinned - last.pinned)
            + _resident(sizes, in_block.parts["kept for backward"], last.pinned),
            temporaries=in_block.parts["temporaries"] + sizes.mask_bytes + sizes.cached_casts,
        ),
        _moment(
            sizes,
            "forward",
            f"loss, {loss.where}",
            "forward loss",
            gradients=before,
            activations=_resident_at_loss(sizes),
            temporaries=_loss_locals(sizes) + stages.fused_temporary_bytes + masks + sizes.cached_casts,
        ),
    ]


def _loss_locals(sizes: Sizes) -> int:
    """What the loss holds at its end: the hidden states, the logits, and their fp32 copy."""
    ops, held = sizes.stages.loss.tape.ops, [sizes.stages.hidden]
    if sizes.recipe.loss == "standard":
        logits = ops[-2].inputs[0]  # what log_softmax read
        copied = (op.inputs[0] for op in ops if op.outputs[0] is logits and "to fp32" in op.name)
        held += [logits, *copied]
    kept = set() if sizes.offloads_activations else {id(t) for t in sizes.stages.loss.kept_tensors}
    # a compiled model never makes what it fuses
    return sum(t.size_bytes for t in held if id(t.storage) not in kept and not t.sources)


def _resident_at_loss(sizes: Sizes) -> int:
    """Kept bytes on the device when the loss is there: with offload, what it was just computed from, and
    what is still on its way out."""
    if not sizes.offloads_activations:
        return sizes.kept_in_forward
    ops, result = sizes.stages.loss.tape.ops, sizes.stages.loss.tape.ops[-1].inputs[0]
    leaving = saved_storages([op for op in ops[:-1] if op.outputs[0] is not result])[-IN_FLIGHT:]
    leaving = [t for t in leaving if t is not sizes.stages.hidden.storage]  # a local: counted as such
    return total_bytes([result, *leaving]) + sizes.stages.fused_loss_bytes + sizes.pinned


def _resident(sizes: Sizes, kept: int, pinned: int) -> int:
    """Bytes kept that are on the device: all, or with offload those pinned to it and the few in flight."""
    if not sizes.offloads_activations:
        return kept
    pinned = min(kept, pinned)
    largest = sorted((t.size_bytes for t in sizes.stages.blocks[-1].kept_tensors), reverse=True)
    return pinned + min(kept - pinned, sum(largest[:IN_FLIGHT]))


def _backward(sizes: Sizes) -> list[Snapshot]:
    """The loss, each kind of block first and last in line, and the embeddings."""
    stages = sizes.stages
    below = sizes.table_bytes + stages.embedding.kept
    below += sum(sizes.block_kept(s) * s.count for s in stages.blocks)
    below += sizes.kept_mask_bytes or (sizes.mask_bytes if sizes.recipe.gradient_checkpointing else 0)
    at_loss = below + max(0, stages.fused_loss_bytes - stages.hidden.size_bytes)
    moments = [_in_backward(sizes, "loss", stages.loss, at_loss, 0)]
    made = _left_behind(sizes, stages.loss)
    for stage in reversed(stages.blocks):
        for index in range(stage.count):
            below -= sizes.block_kept(stage)
            if index in (0, stage.count - 1):  # in between, memory changes evenly
                moments.append(_in_backward(sizes, "backward", stage, below, made))
            below += stage.pinned
            made += _left_behind(sizes, stage)
    return [
        *moments,
        _in_backward(sizes, "backward", stages.embedding, sizes.table_bytes + sizes.pinned, made),
    ]


def _left_behind(sizes: Sizes, stage: Stage) -> int:
    """Weight gradients that stay after a stage's backward.

    Those of offloaded blocks leave with them. The head's stays, and a tied one waits for the embeddings'.
    """
    is_loss = stage is sizes.stages.loss
    if is_loss and sizes.tied_bytes:
        return sizes.tied_bytes
    leaves = "parameters" in sizes.recipe.offload and not is_loss
    if leaves or sizes.recipe.optimizer_in_backward or sizes.earlier_gradients:
        return 0
    fused = max(0, sizes.stages.fused_loss_bytes - sizes.stages.hidden.size_bytes) if is_loss else 0
    return fused + sum(op.weight_gradient_bytes for op in stage.tape.ops)


def _in_backward(sizes: Sizes, phase: str, stage: Stage, below: int, made: int) -> Snapshot:
    """The largest moment of a stage's backward, over what other stages keep and what later ones made."""
    recipe, stages = sizes.recipe, sizes.stages
    in_block = stage in stages.blocks
    entering = stage.entering if recipe.gradient_checkpointing and in_block else None
    elsewhere = [*stage.shared, *([entering] if entering else [])]
    again = 0  # bytes of what is pinned since forward that recomputing makes a second time
    # the two parts of a tied gradient are added into a third tensor (input_buffer.cpp)
    third = sizes.tied_bytes if stage is stages.embedding else 0
    moment = Backward(
        stage.tape.ops,
        elsewhere,
        accumulates=bool(sizes.earlier_gradients),
        frees_weight_gradients=recipe.optimizer_in_backward,
        step_temporary=0.0 if third else _step_share(recipe.optimizer, recipe.optimizer_impl),
        in_flight=IN_FLIGHT if sizes.offloads_activations and not entering else None,
    ).run(recipe.compile)
    if entering:  # kept since forward, and the whole block is computed again from it
        below += entering.size_bytes
        moments = (moment, stage.kept_twice), (_recomputing(stage, elsewhere), stage.pinned)
        moment, again = max(moments, key=lambda m: m[0].size_bytes + m[1])
    parts = moment.parts
    if sizes.offloads_activations:
        below = sizes.pinned - stage.pinned
    return _moment(
        sizes,
        phase,
        f"{stage.name}, {moment.where}",
        moment.where if phase == "loss" else "backward" if in_block else "none",
        gradients=sizes.earlier_gradients + made + parts.get("gradients of weights", 0),
        activations=below + again + parts.get("kept for backward", 0),
        temporaries=parts.get("gradients of activations", 0) + parts.get("temporaries", 0) + third,
    )


def _recomputing(stage: Stage, elsewhere: list) -> Moment:
    """The peak of a block's second forward pass, when the gradient of its output is there already."""
    again = forward_peak(stage.tape.ops, elsewhere)
    waiting = stage.tape.ops[-1].outputs[0].size_bytes
    parts = {**again.parts, "gradients of activations": waiting}
    return Moment(again.size_bytes + waiting, f"{again.where} again", parts)


def _step(sizes: Sizes) -> Snapshot:
    optimizer = sizes.optimizer
    if sizes.recipe.optimizer_in_backward:
        return _moment(sizes, "optimizer_step", "done in backward")
    if optimizer.on_host:
        held = 0 if "parameters" in sizes.recipe.offload else sizes.gradient_bytes
        return _moment(sizes, "optimizer_step", "gradients leave for the host", gradients=held)
    gradients = sizes.gradient_bytes
    if optimizer.gradient_dtype:
        gradients = sum(w.count * w.elements for w in sizes.trained) * SIZES[optimizer.gradient_dtype]
    temporaries = optimizer.step_temporary_bytes
    return _moment(sizes, "optimizer_step", "update", gradients=gradients, temporaries=temporaries)


def _step_share(optimizer: str, implementation: str) -> float:
    """With optimizer_in_backward: bytes a weight's step needs, for each byte of its gradient."""
    if implementation == "fused" or optimizer not in ("adamw", "adafactor"):
        return 0.0
    return 2.0 if optimizer == "adamw" and implementation == "for_loop" else 1.0
