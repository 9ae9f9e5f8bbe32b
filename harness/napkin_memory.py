"""Device memory through one steady optimizer step: every phase's peak, and their maximum. No torch.

"Steady" is from the second step on: the optimizer's state exists. Bytes are those of the tensors; the
allocator rounds each up to 512, which is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from harness.hardware import Hardware
from harness.napkin_liveness import Backward, Moment, forward_peak
from harness.napkin_model import BuiltModel
from harness.napkin_optimizer import OptimizerMemory, optimizer_memory
from harness.napkin_stages import Stage, Stages, build_stages
from harness.napkin_tape import SIZES, total_bytes
from harness.napkin_weights import block_weights, buffer_bytes, outer_weights

IN_FLIGHT = 2
"""Offloaded activations still on their way out, or fetched ahead (harness/offload.py)."""


@dataclass(frozen=True)
class Snapshot:
    """Bytes alive on the device at one moment, by what they are."""

    phase: str
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


class Memory:
    """The memory of one recipe on one device; every quantity is computed once, when asked for."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.hardware = built, hardware
        self.recipe = built.recipe
        self.outer, self.in_blocks = outer_weights(built), block_weights(built)
        self.trained = [w for w in [*self.outer, *self.in_blocks] if w.trained]
        self.stages: Stages = build_stages(built, float(hardware.datasheet.compute_capability))
        self.optimizer: OptimizerMemory = optimizer_memory(built.recipe, self.trained)

    @cached_property
    def parameter_bytes(self) -> int:
        """All parameters and buffers, wherever they are."""
        return sum(w.total_bytes for w in [*self.outer, *self.in_blocks]) + buffer_bytes(self.built)

    @cached_property
    def gradient_bytes(self) -> int:
        """A gradient for each trained parameter, in its dtype."""
        return sum(w.total_bytes for w in self.trained)

    @cached_property
    def input_bytes(self) -> int:
        """All micro batches of a step: ids and labels (int64), and what packing adds to them."""
        recipe = self.recipe
        rows, tokens = recipe.micro_batch_size, recipe.micro_batch_size * recipe.seq_len
        one = 2 * tokens * SIZES["int64"]
        if recipe.packing:
            one += tokens * SIZES["int64"]  # position_ids
            if not recipe.attention.startswith("flash_attention"):
                one += rows * recipe.seq_len**2 * SIZES[self.stages.masks[0].dtype]
        return one * recipe.gradient_accumulation_steps

    @cached_property
    def mask_bytes(self) -> int:
        """Attention masks made in forward; a packed batch brings its own."""
        return 0 if self.recipe.packing else total_bytes(self.stages.masks)

    @cached_property
    def table_bytes(self) -> int:
        return total_bytes(self.stages.tables)

    @property
    def offloads_activations(self) -> bool:
        return "activations" in self.recipe.offload

    def device_parameters(self, moment: str) -> int:
        """Parameters on the device: all; with them offloaded, those in use and those expected next.

        The embeddings leave once read; the head is there throughout forward; blocks come in twos
        (harness/offload_parameters.py).
        """
        if "parameters" not in self.recipe.offload:
            return self.parameter_bytes
        outer = sum(w.total_bytes for w in self.outer)
        block = sum(w.size_bytes for w in self.in_blocks)
        head = self.built.shape.vocab * self.built.shape.hidden * SIZES[self.built.loose_dtype]
        here = {
            "embedding": outer + block,
            "forward": head + 2 * block,
            "forward loss": head,
            "logits": head + block,
            "backward": 2 * block,
        }
        return buffer_bytes(self.built) + here.get(moment, 0)

    @property
    def device_state(self) -> int:
        """Optimizer state and copies on the device, between steps."""
        if self.optimizer.on_host:
            return 0
        scaler = 2 * SIZES["fp32"] if self.recipe.scaled else 0
        return self.optimizer.state_bytes + self.optimizer.copy_bytes + scaler

    @property
    def host_bytes(self) -> int:
        """Host memory of what is offloaded, at its largest; unified (paged) state is counted here too."""
        optimizer, host = self.optimizer, self.optimizer.paged_bytes
        if optimizer.on_host:
            parameters = self.parameter_bytes if "parameters" in self.recipe.offload else 0
            gradients = sum(
                w.count * w.elements * SIZES[optimizer.gradient_dtype or w.dtype] for w in self.trained
            )
            host += optimizer.state_bytes + optimizer.copy_bytes + optimizer.step_temporary_bytes
            host += parameters + gradients
        if self.offloads_activations:
            host += self.kept_in_forward
        return host

    @cached_property
    def kept_in_forward(self) -> int:
        """What the whole forward pass keeps for backward, wherever it is."""
        blocks = sum(self.block_kept(stage) * stage.count for stage in self.stages.blocks)
        loss = self.stages.loss.kept + self.stages.fused_loss_bytes
        return self.table_bytes + self.stages.embedding.kept + blocks + loss

    def block_kept(self, stage: Stage) -> int:
        """What a block keeps from forward to backward: everything, or with checkpointing its input."""
        if self.recipe.gradient_checkpointing and stage.entering is not None:
            return stage.entering.size_bytes
        return stage.kept

    @property
    def cached_casts(self) -> int:
        """Autocast's copies of trained weights that nothing else holds until forward ends.

        Without checkpointing the graph holds them, and they are counted as kept.
        """
        if not self.recipe.gradient_checkpointing:
            return 0
        return sum(stage.tape.weight_cast_bytes * stage.count for stage in self.stages.blocks)

    @cached_property
    def snapshots(self) -> list[Snapshot]:
        """The moments that can be the peak, in the order of the step."""
        return [self._after_setup(), *self._forward(), *self._backward(), self._step()]

    @property
    def peak(self) -> Snapshot:
        """The largest moment of the step; setup is not part of it."""
        return max(self.snapshots[1:], key=lambda s: s.total_bytes)

    def _base(self, phase: str, where: str, moment: str = "", **sizes: int) -> Snapshot:
        settled = {
            "parameters": self.device_parameters(moment or phase),
            "optimizer_state": self.device_state,
            "inputs": self.input_bytes,
            "other": self.hardware.cublas_workspace_bytes,
        }
        return Snapshot(phase, where, **settled | sizes)

    @property
    def _before(self) -> int:
        """Gradients of earlier micro batches."""
        offloaded = "parameters" in self.recipe.offload
        return self.gradient_bytes if self.recipe.gradient_accumulation_steps > 1 and not offloaded else 0

    def _after_setup(self) -> Snapshot:
        copies = 0 if self.optimizer.on_host else self.optimizer.copy_bytes
        held = self.device_parameters("setup")
        return Snapshot("setup", "model and optimizer built", held, optimizer_state=copies)

    def _forward(self) -> list[Snapshot]:
        stages = self.stages
        last = stages.blocks[-1]
        recomputes = self.recipe.gradient_checkpointing
        earlier = self.table_bytes + stages.embedding.kept - self.block_kept(last)
        earlier += sum(self.block_kept(s) * s.count for s in stages.blocks)
        in_block = forward_peak(last.tape.ops, last.shared, keeps=not recomputes)
        loss = forward_peak(stages.loss.tape.ops)
        masks_last = self.mask_bytes if recomputes else 0  # they are gone with the blocks' frame
        return [
            self._base("forward", "embedding", "embedding", gradients=self._before),
            self._base(
                "forward",
                f"last block, {in_block.where}",
                gradients=self._before,
                activations=self._resident(earlier) + self._resident(in_block.parts["kept for backward"]),
                temporaries=in_block.parts["temporaries"] + self.mask_bytes + self.cached_casts,
            ),
            self._base(
                "forward",
                f"loss, {loss.where}",
                "forward loss",
                gradients=self._before,
                activations=self._resident_at_loss(),
                temporaries=self._loss_locals()
                + stages.fused_temporary_bytes
                + masks_last
                + self.cached_casts,
            ),
        ]

    def _loss_locals(self) -> int:
        """What the loss holds at its end: the hidden states, the logits, and their fp32 copy."""
        ops, hidden = self.stages.loss.tape.ops, self.stages.hidden
        held = [hidden]
        if self.recipe.loss == "standard":
            logits = ops[-2].inputs[0]  # what log_softmax read
            held += [
                logits,
                *(op.inputs[0] for op in ops if op.outputs[0] is logits and "to fp32" in op.name),
            ]
        kept = set() if self.offloads_activations else {id(t) for t in self.stages.loss.kept_tensors}
        # a compiled model never makes what it fuses
        return sum(t.size_bytes for t in held if id(t.storage) not in kept and not t.sources)

    def _resident_at_loss(self) -> int:
        """Kept bytes on the device when the loss is there: with offload, what it was just computed from."""
        if not self.offloads_activations:
            return self.kept_in_forward
        return self.stages.loss.tape.ops[-1].inputs[0].size_bytes + self.stages.fused_loss_bytes

    def _resident(self, kept: int) -> int:
        """Bytes kept by earlier blocks that are on the device: all, or with offload the few in flight."""
        if not self.offloads_activations:
            return kept
        largest = sorted((t.size_bytes for t in self.stages.blocks[-1].kept_tensors), reverse=True)
        return min(kept, sum(largest[:IN_FLIGHT]))

    def _backward(self) -> list[Snapshot]:
        """The loss, each kind of block first and last in line, and the embeddings."""
        stages, recipe = self.stages, self.recipe
        below = self.table_bytes + stages.embedding.kept
        below += sum(self.block_kept(s) * s.count for s in stages.blocks)
        if recipe.gradient_checkpointing:
            below += self.mask_bytes
        made = 0
        moments = [self._in_backward("loss", stages.loss, below, made)]
        made += self._weight_gradients(stages.loss)
        for stage in reversed(stages.blocks):
            for index in range(stage.count):
                below -= self.block_kept(stage)
                if index in (0, stage.count - 1):
                    moments.append(self._in_backward("backward", stage, below, made))
                made += self._weight_gradients(stage)
        moments.append(self._in_backward("backward", stages.embedding, self.table_bytes, made))
        return moments

    def _weight_gradients(self, stage: Stage) -> int:
        """Gradients a stage leaves behind. Those of offloaded blocks leave with them; the head's stays, and a
        tied head's waits for the embeddings' to be added to it."""
        if stage is self.stages.loss and self._tied_bytes:
            return self._tied_bytes
        gone = "parameters" in self.recipe.offload and stage is not self.stages.loss
        if gone or self.recipe.optimizer_in_backward or self._before:
            return 0
        fused = self.recipe.loss == "fused_linear" and stage is self.stages.loss
        head = self.stages.fused_loss_bytes - self.stages.hidden.size_bytes if fused else 0
        return head + sum(op.weight_gradient_bytes for op in stage.tape.ops)

    @property
    def _tied_bytes(self) -> int:
        """The gradient of a trained weight that is both embeddings and head; it is made in two parts."""
        shape = self.built.shape
        tied = shape.tied and self.built.trains_base
        return shape.vocab * shape.hidden * SIZES[self.built.loose_dtype] if tied else 0

    def _in_backward(self, phase: str, stage: Stage, below: int, made: int) -> Snapshot:
        recipe = self.recipe
        checkpointed = recipe.gradient_checkpointing and stage in self.stages.blocks
        elsewhere = [*stage.shared, *([stage.entering] if checkpointed and stage.entering else [])]
        # the two parts of a tied gradient are added into a third tensor (input_buffer.cpp)
        third = self._tied_bytes if stage is self.stages.embedding else 0
        moment = Backward(
            stage.tape.ops,
            elsewhere,
            accumulates=bool(self._before),
            frees_weight_gradients=recipe.optimizer_in_backward,
            step_temporary=0.0 if third else _step_share(recipe.optimizer, recipe.optimizer_impl),
            in_flight=IN_FLIGHT if self.offloads_activations and not checkpointed else None,
        ).run(recipe.compile)
        parts = moment.parts
        if checkpointed:  # the input, and the whole block computed again
            below += stage.entering.size_bytes if stage.entering else 0
            again = forward_peak(stage.tape.ops, elsewhere)
            output = stage.tape.ops[-1].outputs[0].size_bytes
            if again.size_bytes + output > moment.size_bytes:
                moment = Moment(again.size_bytes, f"{again.where} again")
                parts = {**again.parts, "gradients of activations": output, "gradients of weights": 0}
        if stage is self.stages.loss:
            below += self.stages.fused_loss_bytes
        return self._base(
            phase,
            f"{stage.name}, {moment.where}",
            moment.where if phase == "loss" else "" if stage in self.stages.blocks else "none",
            gradients=self._before + made + parts.get("gradients of weights", 0),
            activations=(0 if self.offloads_activations else below) + parts.get("kept for backward", 0),
            temporaries=parts.get("gradients of activations", 0) + parts.get("temporaries", 0) + third,
        )

    def _step(self) -> Snapshot:
        optimizer = self.optimizer
        if self.recipe.optimizer_in_backward:
            return self._base("optimizer_step", "done in backward")
        if optimizer.on_host:
            held = 0 if "parameters" in self.recipe.offload else self.gradient_bytes
            return self._base("optimizer_step", "gradients leave for the host", gradients=held)
        gradients = self.gradient_bytes
        if optimizer.gradient_dtype:
            size = SIZES[optimizer.gradient_dtype]
            gradients = sum(w.count * w.elements * size for w in self.trained)
        return self._base(
            "optimizer_step",
            "update",
            gradients=gradients,
            temporaries=optimizer.step_temporary_bytes,
        )


def _step_share(optimizer: str, implementation: str) -> float:
    """With optimizer_in_backward: bytes a weight's step needs, for each byte of its gradient."""
    if implementation == "fused" or optimizer not in ("adamw", "adafactor"):
        return 0.0
    return 2.0 if optimizer == "adamw" and implementation == "for_loop" else 1.0
