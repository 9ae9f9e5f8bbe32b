"""What a step holds: each quantity from the recipe, the model and the device, the moments of a step that can be
its peak, and the largest of them. No torch.

Bytes are those of the tensors. "Steady" is from the second step on: the optimizer's state exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness.hardware import Hardware
from harness.napkin import optimizer
from harness.napkin.activations import Activations
from harness.napkin.ranks import bucket_bytes, units_of
from harness.napkin.terms import Term, sum_of
from harness.napkin.weights import SIZES, BuiltModel, total_bytes

Phase = Literal["setup", "forward", "loss", "backward", "optimizer_step"]
"""`loss` is the first piece of backward."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive on the device at one moment, by what they are."""

    phase: Phase
    where: str
    parameters: int = 0
    gathered_parameters: int = 0
    """FSDP2's units that are whole, and the buffers they are gathered into."""
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0
    inputs: int = 0
    other: int = 0

    @property
    def total_bytes(self) -> int:
        held = self.parameters + self.gathered_parameters + self.gradients + self.optimizer_state
        return held + self.activations + self.temporaries + self.inputs + self.other


class Sizes:
    """The quantities of one recipe on one device."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.hardware, self.recipe = built, hardware, built.recipe
        self.outer, self.in_blocks, self.trained = built.outer, built.in_blocks, built.trained
        self.activations = Activations(built, hardware)
        self.units, self.bucket_bytes = units_of(built), bucket_bytes(built)
        self.micro_batches = self.recipe.gradient_accumulation_steps

    @cached_property
    def parameter_bytes(self) -> int:
        """All parameters and buffers of a rank, wherever they are."""
        return total_bytes([*self.outer, *self.in_blocks]) + self.built.buffer_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """A gradient for each trained parameter, in its dtype."""
        return sum(w.count * w.elements * SIZES[w.dtype] for w in self.trained)

    @cached_property
    def state_bytes(self) -> int:
        """The optimizer's, paged or not."""
        return sum(optimizer.state_bytes(self.recipe, w) for w in self.trained)

    @cached_property
    def paged_bytes(self) -> int:
        return sum(optimizer.paged_bytes(self.recipe, w) for w in self.trained)

    @cached_property
    def copy_bytes(self) -> int:
        """Copies of the weights that are stepped in their place: fp32 master weights, or those on the host."""
        recipe = self.recipe
        if not (recipe.master_weights or (recipe.optimizer_on_host and not recipe.parameters_on_host)):
            return 0
        return sum(w.count * w.elements * optimizer.stepped_width(recipe, w) for w in self.trained)

    @property
    def step_bytes(self) -> int:
        """What a step holds for a moment."""
        return optimizer.step_bytes(self.recipe, self.trained)

    @property
    def device_state(self) -> int:
        """Optimizer state and copies on the device, between steps."""
        return 0 if self.recipe.steps_on_host else self.state_bytes - self.paged_bytes + self.copy_bytes

    @property
    def parameters_away(self) -> bool:
        """Whether weights live in host memory, whole or a rank's part of them."""
        return self.recipe.parameters_on_host or self.recipe.cpu_offload

    @cached_property
    def device_parameters(self) -> int:
        """Parameters on the device while blocks run: all, or with them on the host a block, the next, and what
        is around them."""
        if self.recipe.cpu_offload:
            return self.built.buffer_bytes
        if not self.recipe.parameters_on_host:
            return self.parameter_bytes
        return 2 * total_bytes(self.in_blocks) // self.built.whole.layers + self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Of the output head, whole."""
        return self.built.head.elements * SIZES[self.built.loose_dtype]

    @property
    def quantizing_bytes(self) -> int:
        """In setup, the largest layer is there in full precision while it is quantized."""
        width = SIZES[self.built.made_dtype]
        return width * max((w.elements for w in self.in_blocks if w.quantized), default=0)

    @property
    def input_bytes(self) -> int:
        """Token ids and labels of all micro batches; packed, positions and a mask as well."""
        recipe = self.recipe
        tokens = recipe.tokens_per_step
        mask = recipe.packing * (not recipe.flash_package) * tokens * recipe.seq_len
        return tokens * 8 * (2 + recipe.packing) + mask

    # what is kept ---------------------------------------------------------------------------------------

    @cached_property
    def blocks_kept(self) -> list[tuple[int, int, int]]:
        """Of each kind of block: how many, bytes that one keeps until backward, and computes again then."""
        found: list[tuple[int, int, int]] = []
        for block in self.built.whole.blocks:
            every = sum_of(self.activations.kept_by(block))
            again = every if self.recipe.gradient_checkpointing else 0
            found.append((block.count, self.activations.block_input.size_bytes if again else every, again))
        return found

    @cached_property
    def kept_by_blocks(self) -> int:
        """What all blocks keep from forward to backward."""
        return sum(count * kept for count, kept, _ in self.blocks_kept)

    @cached_property
    def kept_by_loss(self) -> int:
        return sum_of(self.activations.kept_by_loss)

    @cached_property
    def weight_copies(self) -> int:
        """Autocast's 16-bit copies of trained weights: products keep them until backward, and forward does
        with checkpointing (aten/src/ATen/autocast_mode.cpp, cached_cast)."""
        if not self.recipe.mixed or self.recipe.fsdp:
            return 0
        weights = [w for w in self.in_blocks if w.trained and w.matrix and w.dtype == "fp32"]
        head = self.built.head.elements * self.recipe.trains_base
        return SIZES[self.recipe.compute_dtype] * (sum(w.elements * w.count for w in weights) + head)

    @property
    def earlier_gradients(self) -> int:
        """Gradients of earlier micro batches."""
        if self.units and self.units.accumulated:
            return self.units.accumulated
        return 0 if self.micro_batches == 1 or self.parameters_away else self.gradient_bytes

    @property
    def host_parts(self) -> dict[str, int]:
        """What is offloaded to host memory, each part at its largest; without unified (paged) memory."""
        recipe, parts = self.recipe, dict[str, int]()
        if recipe.steps_on_host:
            if self.parameters_away:
                parts["parameters"] = self.parameter_bytes
            parts["gradients"] = self.gradient_bytes * (2 if recipe.master_weights else 1)
            parts["optimizer state"] = self.state_bytes + self.copy_bytes
            parts["the optimizer's temporaries"] = self.step_bytes
        if recipe.activations_on_host:
            parts["activations"] = self.kept_by_blocks + self.kept_by_loss
        return parts

    @property
    def host_bytes(self) -> int:
        """Host memory of what is offloaded or paged, at its largest."""
        return self.paged_bytes + sum(self.host_parts.values())


def required_bytes(memory: Memory) -> int:
    """What must fit on the device: the peak and the CUDA context. Fragmentation comes on top."""
    return memory.peak.total_bytes + memory.sizes.hardware.calibration.cuda_context_bytes


@dataclass(frozen=True)
class Memory:
    """The sizes of a recipe's step, and the moments that can be its peak, in order."""

    sizes: Sizes

    @cached_property
    def moments(self) -> list[Moment]:
        return [self._setup(), *self._forward(), *self._backward(), self._step()]

    @property
    def peak(self) -> Moment:
        """The largest moment of the step; setup is not part of it."""
        return max(self.moments[1:], key=lambda moment: moment.total_bytes)

    def at_end(self, phase: str) -> int | None:
        """Bytes on the device when a phase of the last micro batch ends; None for data."""
        sizes = self.sizes
        settled = self._moment("backward", "").total_bytes
        leave = sizes.recipe.optimizer_in_backward or sizes.parameters_away
        whole = sizes.units.own if sizes.units else 0
        kept = 0 if sizes.recipe.activations_on_host else sizes.kept_by_blocks + sizes.kept_by_loss
        return {
            "forward": settled + sizes.earlier_gradients + whole + kept,
            "backward": settled + (0 if leave else sizes.gradient_bytes),
            "optimizer_step": settled,
        }.get(phase)

    def _moment(self, phase: Phase, where: str, **parts: int) -> Moment:
        """`parts`, and what is there throughout the step."""
        sizes = self.sizes
        settled = {
            "parameters": sizes.device_parameters,
            "optimizer_state": sizes.device_state,
            "inputs": sizes.input_bytes,
            "other": sizes.hardware.cublas_workspace_bytes,
        }
        parts["gradients"] = parts.get("gradients", 0) + sizes.bucket_bytes
        return Moment(phase=phase, where=where, **settled | parts)

    def _setup(self) -> Moment:
        sizes = self.sizes
        copies = 0 if sizes.recipe.steps_on_host else sizes.copy_bytes
        held = sizes.device_parameters if sizes.parameters_away else sizes.parameter_bytes
        where, buckets = "model and optimizer built", sizes.bucket_bytes
        return Moment(phase="setup", where=where, parameters=held, optimizer_state=copies, gradients=buckets)

    @property
    def _blocks(self) -> int:
        """What all blocks keep, on the device."""
        return 0 if self.sizes.recipe.activations_on_host else self.sizes.kept_by_blocks + self._copies

    @property
    def _copies(self) -> int:
        return 0 if self.sizes.recipe.gradient_checkpointing else self.sizes.weight_copies

    def _forward(self) -> list[Moment]:
        sizes, units = self.sizes, self.sizes.units
        in_block = max(kept for _, kept, _ in sizes.blocks_kept)
        again = max(again or kept * sizes.recipe.activations_on_host for _, kept, again in sizes.blocks_kept)
        cached = sizes.weight_copies - self._copies
        return [
            self._moment(
                "forward",
                "the last block",
                gathered_parameters=units.forward if units else 0,
                gradients=sizes.earlier_gradients,
                activations=self._blocks,
                temporaries=max(0, again - in_block) + cached,
            ),
            self._moment(
                "forward",
                "the end of the loss",
                gathered_parameters=units.own + units.block if units else 0,
                gradients=sizes.earlier_gradients,
                activations=self._blocks + sizes.kept_by_loss,
                temporaries=sum_of(sizes.activations.held_after_forward) + cached,
            ),
        ]

    def _backward(self) -> list[Moment]:
        sizes, acts, units, recipe = self.sizes, self.sizes.activations, self.sizes.units, self.sizes.recipe
        earlier, shape = sizes.earlier_gradients, self.sizes.built.whole
        loss = self._moment(
            "loss",
            "the gradient of the logits",
            gathered_parameters=units.own if units else 0,
            gradients=earlier,
            activations=self._blocks + sizes.kept_by_loss,
            temporaries=sum_of(acts.held_in_backward),
        )
        leaves = recipe.optimizer_in_backward or sizes.parameters_away or (earlier > 0 and not units)
        made = 0 if leaves else sizes.gradient_bytes
        head = sizes.head_bytes * recipe.trains_base
        outer = sum(w.elements * SIZES[w.dtype] for w in sizes.outer if w.trained)
        whole = units.gradients * 2 if units else 0
        if units:
            head = units.own_gradients if not recipe.head_apart else head // recipe.dp_shard
        once = head * (not leaves or recipe.parameters_on_host) if head else 0
        logits = acts.dims.elements("B·S·V") * acts.compute * (not recipe.fused_loss)
        cast = head // 2 if recipe.mixed and not recipe.fsdp else 0
        moments = [
            loss,
            self._moment(
                "backward",
                "the head",
                gathered_parameters=units.own if units else 0,
                gradients=earlier + head,
                activations=self._blocks,
                temporaries=logits + cast,
            ),
        ]
        for block, (_, kept, again) in zip(shape.blocks, sizes.blocks_kept, strict=True):
            running = again or kept * recipe.activations_on_host
            passing = acts.passing(block) + running + whole
            held = {"gathered_parameters": units.backward if units else 0, "temporaries": passing}
            largest = max((w.elements * SIZES[w.dtype] for w in sizes.in_blocks if w.trained), default=0)
            stepped = largest * (1 + optimizer.passing_share(recipe)) if leaves else 0
            first = self._moment(
                "backward",
                f"the last block ({block.mixer}, {block.feed})",
                gradients=earlier + once + stepped,
                activations=self._blocks,
                **held,
            )
            left = 0 if recipe.activations_on_host else kept
            end = self._moment(
                "backward",
                f"the first block ({block.mixer}, {block.feed})",
                gradients=earlier + max(made - (outer - once if not units else 0), stepped),
                activations=left,
                **held,
            )
            moments += [first, end]
        embeddings = shape.vocab * shape.hidden * SIZES[sizes.built.loose_dtype] * recipe.trains_base
        step = optimizer.passing_share(recipe) if recipe.optimizer_in_backward else 0
        third = 0 if not shape.tied or recipe.mixed else embeddings
        moments.append(
            self._moment(
                "backward",
                "the embeddings",
                gathered_parameters=units.own if units else 0,
                gradients=earlier + (embeddings if leaves else made),
                temporaries=max(third, embeddings * step) + (2 * units.own_gradients if units else 0),
            )
        )
        return moments

    def _step(self) -> Moment:
        sizes, recipe = self.sizes, self.sizes.recipe
        if recipe.optimizer_in_backward:
            return self._moment("optimizer_step", "done in backward")
        if recipe.steps_on_host:
            held = 0 if sizes.parameters_away else sizes.gradient_bytes
            return self._moment("optimizer_step", "gradients leave for the host", gradients=held)
        gradients = sizes.gradient_bytes
        if recipe.master_weights:  # cast as they are taken
            gradients = sum(4 * w.elements * w.count for w in sizes.trained)
        return self._moment("optimizer_step", "update", gradients=gradients, temporaries=sizes.step_bytes)


def rank_terms(sizes: Sizes) -> list[Term]:
    """What one of several ranks has beside its part; none on one GPU."""
    if sizes.bucket_bytes:
        source = "torch/csrc/distributed/c10d/reducer.cpp, gradient_as_bucket_view=False"
        return [Term("Gradients", "DDP's copy", "as many bytes as gradients", sizes.bucket_bytes, source)]
    return sizes.units.terms if sizes.units else []
