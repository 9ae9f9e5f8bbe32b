"""What a step holds: the sizes of its parts, the moments that can be its peak, and the largest of them. No torch.

Bytes are those of the tensors, in a steady step: from the second on, when the optimizer's state exists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from harness.hardware import Hardware
from harness.napkin import optimizer
from harness.napkin.activations import Activations
from harness.napkin.ranks import units_of
from harness.napkin.terms import sum_of
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
        return sum(getattr(self, name) for name in PARTS)


PARTS = tuple(field.name for field in fields(Moment) if field.name not in ("phase", "where"))


class Sizes:
    """The quantities of one recipe on one device, each computed once."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.hardware, self.recipe, self.units = built, hardware, built.recipe, units_of(built)
        self.outer, self.in_blocks = built.outer, built.in_blocks
        self.trained = [w for w in (*built.outer, *built.in_blocks) if w.trained]
        self.activations = Activations(built, hardware)
        self.micro_batches, recipe = self.recipe.gradient_accumulation_steps, self.recipe
        self.parameter_bytes = total_bytes([*self.outer, *self.in_blocks]) + built.buffer_bytes
        self.gradient_bytes = sum(w.count * w.elements * SIZES[w.dtype] for w in self.trained)
        self.bucket_bytes = self.gradient_bytes if recipe.ddp else 0
        """DDP's second copy of the gradients (gradient_as_bucket_view=False, its default)."""
        self.state_bytes = sum(optimizer.state_bytes(recipe, w) for w in self.trained)
        self.paged_bytes = sum(optimizer.paged_bytes(recipe, w) for w in self.trained)
        self.step_bytes = optimizer.step_bytes(recipe, self.trained)
        copied = recipe.master_weights or (recipe.optimizer_on_host and not recipe.parameters_on_host)
        stepped = sum(w.count * w.elements * optimizer.stepped_width(recipe, w) for w in self.trained)
        self.copy_bytes = stepped if copied else 0
        """Weights that are stepped in place of the model's: fp32 master weights, or those on the host."""
        self.device_state = 0 if recipe.steps_on_host else self.state_bytes - self.paged_bytes + self.copy_bytes
        self.away = recipe.parameters_on_host or recipe.cpu_offload
        """Weights live in host memory, whole or a rank's part of them."""
        self.head_bytes = built.head.elements * SIZES[built.loose_dtype]
        self.device_parameters, self.input_bytes = self.parameter_bytes, self.activations.input_bytes
        if self.away:  # a block, the next, and the head
            around = 2 * total_bytes(self.in_blocks) // built.shape.layers + self.head_bytes
            self.device_parameters = built.buffer_bytes if recipe.cpu_offload else around

    @property
    def quantizing_bytes(self) -> int:
        """In setup, the largest layer is there in full precision while it is quantized."""
        quantized = (w.elements for w in self.in_blocks if w.quantized)
        return SIZES[self.built.made_dtype] * max(quantized, default=0)

    @cached_property
    def kept(self) -> list[tuple[int, int, int]]:
        """Of each kind of block: how many, bytes that one keeps until backward, and computes again there."""
        acts, blocks = self.activations, self.built.shape.blocks
        every = [(block.count, sum_of(acts.kept_by(block))) for block in blocks]
        if acts.recomputes:
            return [(count, acts.block_input.size_bytes, again) for count, again in every]
        return [(count, kept, 0) for count, kept in every]

    @cached_property
    def kept_by_blocks(self) -> int:
        """What all blocks keep from forward to backward, wherever it is."""
        return sum(count * kept for count, kept, _ in self.kept)

    @cached_property
    def kept_by_loss(self) -> int:
        return sum_of(self.activations.kept_by_loss)

    @property
    def weight_copies(self) -> int:
        """Autocast's 16-bit copies of trained weights, kept until forward ends, and without checkpointing
        until backward reads them (aten/src/ATen/autocast_mode.cpp, cached_cast)."""
        if not self.recipe.mixed or self.recipe.fsdp:
            return 0
        matrices = sum(w.elements * w.count for w in self.in_blocks if w.trained and w.matrix and w.dtype == "fp32")
        return SIZES[self.recipe.compute_dtype] * (matrices + self.built.head.elements * self.recipe.trains_base)

    @property
    def earlier_gradients(self) -> int:
        """Gradients of earlier micro batches; with FSDP2 whole ones, where they are not reduced yet."""
        if self.micro_batches == 1 or (self.away and not self.units.layers):
            return 0
        whole = self.units.layers * self.units.reduced + self.units.own_reduced
        waits = self.recipe.syncs_per_step < self.micro_batches
        return whole if self.units.layers and waits else 0 if self.away else self.gradient_bytes

    @property
    def host_parts(self) -> dict[str, int]:
        """What is offloaded to host memory, each part at its largest; without unified (paged) memory."""
        parts: dict[str, int] = {"parameters": self.parameter_bytes} if self.away else {}
        if self.recipe.steps_on_host:
            parts["gradients"] = self.gradient_bytes * (2 if self.recipe.master_weights else 1)
            parts["optimizer state"] = self.state_bytes + self.copy_bytes
            parts["the optimizer's temporaries"] = self.step_bytes
        if self.recipe.activations_on_host:
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

    @property
    def peak(self) -> Moment:
        """The largest moment of the step; setup is not part of it."""
        return max(self.moments[1:], key=lambda moment: moment.total_bytes)

    def _at(self, phase: Phase, where: str, **parts: int) -> Moment:
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

    @cached_property
    def moments(self) -> list[Moment]:
        sizes, recipe, acts, units = self.sizes, self.sizes.recipe, self.sizes.activations, self.sizes.units
        built, away, earlier = sizes.built, sizes.away, sizes.earlier_gradients
        on_host, trains = recipe.activations_on_host, recipe.trains_base
        copies = sizes.weight_copies
        blocks = 0 if on_host else sizes.kept_by_blocks + (0 if acts.recomputes else copies)
        cached = copies if acts.recomputes else 0
        with_loss = blocks + sizes.kept_by_loss
        leaves = recipe.optimizer_in_backward or away or (earlier > 0 and not units.layers)
        made = 0 if leaves else sizes.gradient_bytes  # gradients that stay when all are made
        width, share = SIZES[built.loose_dtype], optimizer.passing_share(recipe)
        head = units.own_made if units.layers else sizes.head_bytes * trains
        stays = 0 if leaves and not recipe.parameters_on_host else head
        outer = units.own_made if units.layers else sum(w.elements * width for w in sizes.outer if w.trained)
        logits = 0 if recipe.fused_loss else acts.dims.of("B·S·V") * acts.compute
        largest = max((w.size_bytes for w in sizes.in_blocks if w.trained), default=0)
        stepped = largest * (1 + share) if leaves else 0
        setup = sizes.parameter_bytes if not away else sizes.device_parameters
        moments = [
            Moment(
                phase="setup",
                where="model and optimizer built",
                parameters=setup,
                optimizer_state=0 if recipe.steps_on_host else sizes.copy_bytes,
                gradients=sizes.bucket_bytes,
            ),
            self._at(
                "forward",
                "the end of the loss",
                gathered_parameters=units.gathered(1),
                gradients=earlier,
                activations=with_loss,
                temporaries=sum_of(acts.held_after_forward) + cached,
            ),
            self._at(
                "loss",
                "the gradient of the logits",
                gathered_parameters=units.own,
                gradients=earlier,
                activations=with_loss,
                temporaries=sum_of(acts.held_in_backward),
            ),
            self._at(
                "backward",
                "the head",
                gathered_parameters=units.own,
                gradients=earlier + head,
                activations=blocks,
                temporaries=logits + (head // 2 if copies else 0),
            ),
        ]
        for block, (_, kept, again) in zip(built.shape.blocks, sizes.kept, strict=True):
            running = again or kept * on_host
            passing = acts.passing(block) + running + units.made + units.reduced
            at_last, at_first = earlier + stays + stepped, earlier + max(made - max(0, outer - stays), stepped)
            ends = {"last": (blocks, at_last), "first": (0 if on_host else kept, at_first)}
            for which, (held, gradients) in ends.items():
                where = f"the {which} block ({block.mixer}, {block.feed})"
                at = self._at(
                    "backward",
                    where,
                    gathered_parameters=units.gathered(2),
                    gradients=gradients,
                    activations=held,
                    temporaries=passing,
                )
                moments.append(at)
            forward = self._at(
                "forward",
                f"the last block ({block.mixer}, {block.feed})",
                gathered_parameters=units.gathered(3),
                gradients=earlier,
                activations=blocks,
                temporaries=running + cached,
            )
            moments.insert(1, forward)
        embeddings = built.shape.vocab * built.shape.hidden * width * trains
        added = 0 if not built.shape.tied or recipe.mixed else embeddings  # a tied one's second part
        part = made - units.own_made // recipe.dp_shard + units.own_made if units.layers else made
        ends = self._at(
            "backward",
            "the embeddings",
            gradients=earlier + (embeddings if leaves else part),
            temporaries=max(added, embeddings * share * recipe.optimizer_in_backward) + units.own_reduced,
        )
        return [*moments, ends, self._step()]

    def _step(self) -> Moment:
        sizes, recipe = self.sizes, self.sizes.recipe
        if recipe.optimizer_in_backward:
            return self._at("optimizer_step", "done in backward")
        if recipe.steps_on_host:
            held = 0 if sizes.away else sizes.gradient_bytes
            return self._at("optimizer_step", "gradients leave for the host", gradients=held)
        casts = recipe.master_weights  # gradients are cast as they are taken
        gradients = sum(4 * w.elements * w.count for w in sizes.trained) if casts else sizes.gradient_bytes
        return self._at("optimizer_step", "update", gradients=gradients, temporaries=sizes.step_bytes)
