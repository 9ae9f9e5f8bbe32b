"""What a step holds, part by part: each quantity computed once from the recipe, the model and the device.

No torch. Bytes are those of the tensors; the CUDA allocator rounds each up to 512, which is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from harness.hardware import Hardware
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.optimizer import OptimizerMemory, optimizer_memory
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.weights import block_weights, buffer_bytes, outer_weights
from harness.napkin.ranks.buckets import ddp_buckets, in_forward_order, rounded_bytes
from harness.napkin.ranks.parts import packed_part, part_of
from harness.napkin.ranks.units import Units, as_computed
from harness.napkin.tape.stages import Stage, Stages, build_stages
from harness.napkin.tape.tape import total_bytes


class Sizes:
    """The quantities of one recipe on one device, each computed when first asked for."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.hardware = built, hardware
        self.recipe = built.recipe
        outer, in_blocks = outer_weights(built), block_weights(built)
        self.outer, self.in_blocks = outer, in_blocks
        self.units: Units | None = None
        if self.recipe.fsdp:
            ranks = self.recipe.dp_shard
            self.outer, self.in_blocks = ([part_of(w, ranks) for w in kinds] for kinds in (outer, in_blocks))
            self.units = Units(
                self.recipe,
                outer,
                in_blocks,
                tied=built.shape.tied,
                micro_batches=self.micro_batches,
                on_host=self.parts_on_host,
            )
        self.trained = [w for w in [*self.outer, *self.in_blocks] if w.trained]
        capability = float(hardware.datasheet.compute_capability)
        self.stages: Stages = build_stages(as_computed(built), capability, hardware.gpu_threads)
        self.optimizer: OptimizerMemory = optimizer_memory(
            built.recipe, self.trained, parts_on_host=self.parts_on_host
        )

    @property
    def parts_on_host(self) -> bool:
        """Whether FSDP2 keeps a rank's parts of weights, gradients and state in host memory."""
        return self.recipe.cpu_offload

    @cached_property
    def parameter_bytes(self) -> int:
        """All parameters and buffers of a rank, wherever they are."""
        return sum(w.total_bytes for w in [*self.outer, *self.in_blocks]) + buffer_bytes(self.built)

    @cached_property
    def gradient_bytes(self) -> int:
        """A gradient for each trained parameter, in its dtype."""
        return sum(w.count * w.gradient_elements * SIZES[w.dtype] for w in self.trained)

    @property
    def quantizing_bytes(self) -> int:
        """In setup, the largest layer is on the device in full precision while it is quantized."""
        made = SIZES[self.built.made_dtype]
        quantized = (w.elements for w in self.in_blocks if w.quantized)
        return max(quantized, default=0) * made

    @cached_property
    def input_bytes(self) -> int:
        """What all micro batches of a step bring."""
        return total_bytes(self.stages.batch) * self.micro_batches

    @property
    def micro_batches(self) -> int:
        """Of one optimizer step."""
        return self.recipe.gradient_accumulation_steps

    @cached_property
    def mask_bytes(self) -> int:
        """Attention masks made in forward."""
        return total_bytes(self.stages.masks)

    @cached_property
    def table_bytes(self) -> int:
        return total_bytes(self.stages.tables)

    def device_parameters(
        self, *, outer: bool = False, head: bool = False, block: bool = False, expected: bool = False
    ) -> int:
        """Parameters on the device: all; with them offloaded, those in use: all that is outside the blocks,
        or of that the head, and a block; and the block that is expected next
        (harness/training/toggles/offload_parameters.py)."""
        if self.parts_on_host:  # the scales of 4-bit weights are no parameters
            packed = [w for w in self.in_blocks if w.quantized]
            parts = sum(w.count * packed_part(w, self.recipe.dp_shard) for w in packed)
            return buffer_bytes(self.built) + sum(w.total_bytes for w in packed) - parts
        if not self.recipe.parameters_on_host:
            return self.parameter_bytes
        around = sum(w.used_bytes for w in self.outer) if outer else head * self.head_bytes
        used, sent = sum(w.used_bytes for w in self.in_blocks), sum(w.size_bytes for w in self.in_blocks)
        return buffer_bytes(self.built) + around + block * used + expected * sent

    @property
    def head_bytes(self) -> int:
        """The weight of the output head as it is used; tied embeddings share it."""
        head = self.built.head
        return head.elements * SIZES[self.built.linear_dtype(head)]

    @property
    def device_state(self) -> int:
        """Optimizer state and copies on the device, between steps."""
        if self.optimizer.on_host:
            return 0
        scaler = 2 * SIZES["fp32"] if self.recipe.scaled else 0
        return self.optimizer.state_bytes + self.optimizer.copy_bytes + scaler

    @property
    def host_parts(self) -> dict[str, int]:
        """What is offloaded to host memory, each part at its largest; without unified (paged) memory."""
        optimizer = self.optimizer
        parts: dict[str, int] = {}
        if optimizer.on_host:
            if self.recipe.parameters_on_host or self.parts_on_host:
                parts["parameters"] = self.parameter_bytes
            parts["gradients"] = sum(
                w.count * w.elements * SIZES[optimizer.gradient_dtype or w.dtype] for w in self.trained
            )
            parts["optimizer state"] = optimizer.state_bytes + optimizer.copy_bytes
            parts["the optimizer's temporaries"] = optimizer.step_temporary_bytes
        if self.recipe.activations_on_host:
            parts["activations"] = self.kept_in_forward - self.kept_by_ctx
        return parts

    @property
    def host_bytes(self) -> int:
        """Host memory of what is offloaded, at its largest; unified (paged) state is counted here too."""
        return self.optimizer.paged_bytes + sum(self.host_parts.values())

    @cached_property
    def kept_in_forward(self) -> int:
        """What the whole forward pass keeps for backward, wherever it is."""
        stages = self.stages
        blocks = sum(stage.kept_until_backward * stage.count for stage in stages.blocks)
        around = stages.embedding.kept + stages.loss.kept + self.fused_loss_bytes
        return self.table_bytes + total_bytes(stages.kept_masks) + blocks + around

    @cached_property
    def lost_bytes(self) -> int:
        """What the steps before the recipe's last one have lost for good, with tensor parallelism and
        gradient checkpointing."""
        each = self.micro_batches * sum(stage.lost * stage.count for stage in self.stages.blocks)
        return each * (self.recipe.warmup_steps + self.recipe.steps)

    @property
    def fused_loss_bytes(self) -> int:
        """Of that, gradients that a fused loss has computed already."""
        fused = self.stages.head.fused
        return fused.gradient_bytes if fused else 0

    @property
    def kept_by_ctx(self) -> int:
        """Of that, what stays on the device in any case."""
        return sum(stage.kept_by_ctx * stage.count for stage in self.stages.blocks)

    def cached_casts(self, stages: Sequence[Stage]) -> int:
        """Autocast's copies of trained weights that nothing else holds on the device until forward ends.

        The graph holds them too, and they are counted as kept, unless the stage is checkpointed or what is
        kept leaves for the host.
        """
        alone = [s for s in stages if s.checkpointed or self.recipe.activations_on_host]
        return sum(total_bytes(stage.tape.cached) * stage.count for stage in alone)

    @property
    def earlier_gradients(self) -> int:
        """Gradients of earlier micro batches: a rank's part, or whole where they are not reduced yet."""
        if self.units and self.units.accumulated:
            return self.units.accumulated
        on_host = self.recipe.parameters_on_host or self.parts_on_host
        return self.gradient_bytes if self.micro_batches > 1 and not on_host else 0

    @cached_property
    def buckets(self) -> list[int]:
        """DDP's buckets of gradients, in bytes; none without DDP."""
        if not self.recipe.ddp:
            return []
        return ddp_buckets(in_forward_order(self.outer, self.in_blocks))

    @property
    def bucket_bytes(self) -> int:
        """DDP's second copy of the gradients, which lives as long as the model."""
        return rounded_bytes(self.buckets)

    @property
    def tied_bytes(self) -> int:
        """The gradient of a trained weight that is both embeddings and head; it is made in two parts."""
        return self.head_bytes if self.built.shape.tied and self.built.trains_base else 0

    @property
    def tied_sum_bytes(self) -> int:
        """What the sum of the two parts takes. Autograd adds into the head's part if nobody else holds its
        memory: a cast's result, or a gradient that a fused loss has kept and that was not fetched from the
        host; but not the transpose of a product (torch/csrc/autograd/input_buffer.cpp), nor a DTensor. Of
        that, the embeddings' words that a rank has are taken out first."""
        if self.built.tp > 1:
            return 2 * self.tied_bytes
        if self.stages.head.fused:
            return self.tied_bytes if self.recipe.activations_on_host else 0
        return 0 if self.built.autocast else self.tied_bytes
