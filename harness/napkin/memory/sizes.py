"""What a step holds, part by part: each quantity computed once from the recipe, the model and the device.

No torch. Bytes are those of the tensors; the CUDA allocator rounds each up to 512, which is left out.
"""

from __future__ import annotations

from functools import cached_property

from harness.hardware import Hardware
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.optimizer import OptimizerMemory, optimizer_memory
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.weights import block_weights, buffer_bytes, outer_weights
from harness.napkin.tape.stages import Stage, Stages, build_stages
from harness.napkin.tape.tape import total_bytes


class Sizes:
    """The quantities of one recipe on one device, each computed when first asked for."""

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

    @property
    def quantizing_bytes(self) -> int:
        """In setup, the largest layer is on the device in full precision while it is quantized."""
        made = SIZES[self.built.made_dtype]
        quantized = (w.elements for w in self.in_blocks if w.dtype in ("nf4", "fp4", "int8"))
        return max(quantized, default=0) * made

    @cached_property
    def input_bytes(self) -> int:
        """All micro batches of a step: ids and labels (int64), and what packing adds to them."""
        recipe = self.recipe
        rows, tokens = recipe.micro_batch_size, recipe.micro_batch_size * recipe.seq_len
        one = 2 * tokens * SIZES["int64"]
        if recipe.packing:
            one += tokens * SIZES["int64"]  # position_ids
            if not recipe.attention.startswith("flash_attention"):
                mask = "bool" if recipe.attention == "sdpa" else self.stages.masks[0].dtype
                one += rows * recipe.seq_len**2 * SIZES[mask]
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
        (harness/training/toggles/offload_parameters.py).
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
    def host_parts(self) -> dict[str, int]:
        """What is offloaded to host memory, each part at its largest; without unified (paged) memory."""
        optimizer, parts = self.optimizer, {}
        if optimizer.on_host:
            if "parameters" in self.recipe.offload:
                parts["parameters"] = self.parameter_bytes
            parts["gradients"] = sum(
                w.count * w.elements * SIZES[optimizer.gradient_dtype or w.dtype] for w in self.trained
            )
            parts["optimizer state"] = optimizer.state_bytes + optimizer.copy_bytes
            parts["the optimizer's temporaries"] = optimizer.step_temporary_bytes
        if self.offloads_activations:
            parts["activations"] = self.kept_in_forward - self.pinned
        return parts

    @property
    def host_bytes(self) -> int:
        """Host memory of what is offloaded, at its largest; unified (paged) state is counted here too."""
        return self.optimizer.paged_bytes + sum(self.host_parts.values())

    @cached_property
    def kept_in_forward(self) -> int:
        """What the whole forward pass keeps for backward, wherever it is."""
        blocks = sum(self.block_kept(stage) * stage.count for stage in self.stages.blocks)
        loss = self.stages.loss.kept + self.stages.fused_loss_bytes
        return self.table_bytes + self.kept_mask_bytes + self.stages.embedding.kept + blocks + loss

    @property
    def pinned(self) -> int:
        """Of that, what stays on the device in any case."""
        return sum(stage.pinned * stage.count for stage in self.stages.blocks)

    @property
    def kept_mask_bytes(self) -> int:
        """A compiled model keeps the one mask that all its blocks add; else each block keeps its copy."""
        shared = self.recipe.compile and self.recipe.attention == "sdpa"
        return total_bytes(self.stages.masks) if shared else 0

    def block_kept(self, stage: Stage) -> int:
        """What a block keeps from forward to backward: everything, or with checkpointing its input and
        what checkpointing does not reach."""
        if self.recipe.gradient_checkpointing and stage.entering is not None:
            return stage.entering.size_bytes + stage.pinned
        return stage.kept

    @property
    def cached_casts(self) -> int:
        """Autocast's copies of trained weights that nothing else holds until forward ends.

        Without checkpointing the graph holds them, and they are counted as kept.
        """
        if not self.recipe.gradient_checkpointing:
            return 0
        return sum(stage.tape.weight_cast_bytes * stage.count for stage in self.stages.blocks)

    @property
    def earlier_gradients(self) -> int:
        """Gradients of earlier micro batches."""
        offloaded = "parameters" in self.recipe.offload
        return self.gradient_bytes if self.recipe.gradient_accumulation_steps > 1 and not offloaded else 0

    @property
    def tied_bytes(self) -> int:
        """The gradient of a trained weight that is both embeddings and head; it is made in two parts."""
        shape = self.built.shape
        tied = shape.tied and self.built.trains_base
        return shape.vocab * shape.hidden * SIZES[self.built.loose_dtype] if tied else 0
