"""What a steady step holds: the sizes of its parts, and the moments that can be its peak. No torch."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from harness.hardware import Hardware
from harness.napkin.activations import Activations
from harness.napkin.optimizer import OptimizerMemory
from harness.napkin.terms import sum_of
from harness.napkin.weights import SIZES, BuiltModel, Weight, total_bytes
from harness.step_profile import CATEGORIES

Phase = Literal["setup", "forward", "loss", "backward", "optimizer_step"]
"""`loss` is the first part of backward."""


class Moment(NamedTuple):
    """One moment of the step."""

    phase: Phase
    where: str
    """What the step is doing."""
    held: dict[str, int]
    """The bytes alive on the device by category. `gathered_parameters` are FSDP2's units that are whole, and
    their buffers."""

    @property
    def total_bytes(self) -> int:
        return sum(self.held.values())


class Unit(NamedTuple):
    """The bytes of a unit of FSDP2 while it is gathered (torch/distributed/fsdp/_fully_shard)."""

    weights: int = 0
    """In the dtype in which they compute."""
    made: int = 0
    """The gradients of those that train, as backward makes them."""
    reduced: int = 0
    """The same gradients as the input of their reduce-scatter."""


class Memory:
    """What the memory of one recipe on one device is made of, in bytes. Each size is computed once."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.hardware, self.recipe = built, hardware, built.recipe
        recipe, weights = built.recipe, [*built.outer, *built.in_blocks]
        self.trained = [w for w in weights if w.trained]
        acts = self.activations = Activations(built, hardware)
        step = self.optimizer = OptimizerMemory(recipe, self.trained)
        self.micro_batches = recipe.gradient_accumulation_steps
        self.parameter_bytes = total_bytes(weights) + built.buffer_bytes
        self.reference_bytes = self.parameter_bytes if recipe.copies_reference else 0  # as dpo's model was
        self.gradient_bytes = sum(w.count * w.elements * SIZES[w.dtype] for w in self.trained)
        self.bucket_bytes = self.gradient_bytes if recipe.ddp else 0  # gradient_as_bucket_view=False
        held = step.state_bytes - step.paged_bytes + step.copy_bytes
        self.device_state = 0 if recipe.steps_on_host else held
        self.away = recipe.parameters_on_host or recipe.cpu_offload  # weights, whole or a rank's part of them
        self.head_bytes = built.head.elements * SIZES[built.loose_dtype]
        around = 2 * total_bytes(built.in_blocks) // built.shape.layers + self.head_bytes
        there = built.buffer_bytes if recipe.cpu_offload else around  # a block, the next, and the head
        self.device_parameters = (there if self.away else self.parameter_bytes) + self.reference_bytes
        self.input_bytes = acts.input_bytes
        budget = self.budget = recipe.activation_memory_budget
        whole = [(block, sum_of(acts.kept_until_backward(block))) for block in built.shape.blocks]
        self.kept = [(block.count, int(each * budget), acts.made_again(block)) for block, each in whole]
        """For each kind of block: how many there are, the bytes that one keeps until backward, and the bytes
        that it computes again in backward."""
        self.kept_by_blocks = sum(count * kept for count, kept, _ in self.kept)
        self.kept_by_loss = int(sum_of(acts.loss.kept) * budget)
        self.made_again = int(sum(block.count * each for block, each in whole) * (1 - budget))
        """With activation_memory_budget, what the compiled backward makes again of what blocks keep: all of
        it can be there at once, since the compiler orders backward as it likes."""
        quantized = max((w.elements for w in built.in_blocks if w.quantized), default=0)
        self.quantizing_bytes = SIZES[built.made_dtype] * quantized
        """The largest weight before it is quantized: in setup one layer at a time is whole."""
        in_fp8 = {matrix.name for _, matrix in built.matrices if built.in_fp8(matrix)}
        other = SIZES.keys() - {recipe.compute_dtype}  # fp32, or a checkpoint's bf16 under fp16's autocast
        cast = [w for w in built.in_blocks if w.matrix and w.dtype in other and w.name not in in_fp8]
        stay = sum(w.elements * w.count for w in cast if w.trained or not acts.recomputes)
        stay *= 1 if acts.recomputes else recipe.forward_passes
        self.weight_copies = acts.compute * stay if recipe.mixed and not recipe.fsdp else 0
        """Autocast's copies of weights of another dtype. They are kept until backward, or with checkpointing
        until forward ends. Each pass of forward makes its own."""
        self.block, self.own, self.reshards = Unit(), Unit(), recipe.reshard_after_forward
        """FSDP2's units: an average block, and what is outside of blocks."""
        if recipe.fsdp:
            apart = recipe.head_apart and not built.shape.tied  # then the embeddings are a unit like a block
            outside = [w for w in built.outer if not (apart and w.name == "embed_tokens")]
            self.block, self.own = self._unit(built.in_blocks, built.shape.layers), self._unit(outside)
        added = 0 if self.away or self.micro_batches == 1 else self.gradient_bytes
        later = recipe.fsdp and recipe.syncs_per_step < self.micro_batches
        self.earlier_gradients = self.reduced_bytes if later else added  # of earlier micro batches

    def _unit(self, weights: Sequence[Weight], count: int = 1) -> Unit:
        """One of `count` units that have equal parts of a rank's `weights`."""
        recipe = self.recipe
        computes, trained = recipe.compute_dtype if recipe.mixed else None, [w for w in weights if w.trained]

        def whole(weights: Sequence[Weight], dtype: str | None) -> int:
            sizes = (w.size_bytes if w.quantized else w.elements * SIZES[dtype or w.dtype] for w in weights)
            found = sum(size * w.count for size, w in zip(sizes, weights, strict=True))
            return recipe.dp_shard * found // count

        reduced = whole(trained, recipe.reduce_dtype or computes)
        return Unit(whole(weights, computes), whole(trained, computes), reduced)

    @property
    def reduced_bytes(self) -> int:
        """The gradients of all units of FSDP2 as the input of their reduce-scatter."""
        return self.built.shape.layers * self.block.reduced + self.own.reduced

    def gathered(self, copies: int) -> int:
        """FSDP2's gathered bytes while a block is computed: what is outside, and `copies` of a block (itself,
        the next, and communication buffers), or all blocks where they stay from forward to backward."""
        blocks = copies if self.reshards else self.built.shape.layers
        return self.own.weights + blocks * self.block.weights

    @property
    def host_parts(self) -> dict[str, int]:
        """The bytes that are offloaded to host memory, by part, each at its largest. Unified memory of paged
        optimizers is not among them."""
        step, parts = self.optimizer, {"parameters": self.parameter_bytes} if self.away else {}
        if self.recipe.steps_on_host:
            parts |= {"gradients": step.gradient_bytes, "optimizer state": step.state_bytes + step.copy_bytes}
            parts["the optimizer's temporaries"] = step.step_bytes
        return parts | ({"activations": self.kept_on_host} if self.recipe.blocks_on_host else {})

    @property
    def kept_on_host(self) -> int:
        """The bytes of what one micro batch keeps for backward in host memory."""
        kept = self.kept_by_blocks + self.kept_by_loss * self.recipe.activations_on_host
        return kept * self.recipe.blocks_on_host

    @property
    def required_bytes(self) -> int:
        """The bytes that must fit on the device: the peak and the CUDA context, without fragmentation."""
        return self.peak.total_bytes + self.hardware.calibration.cuda_context_bytes

    @cached_property
    def peak(self) -> Moment:
        """The largest moment of the step. Setup is not part of the step."""
        return max(self.moments[1:], key=lambda moment: moment.total_bytes)

    @cached_property
    def moments(self) -> list[Moment]:
        """Setup, and then the moments of the step in order: any of them can be its peak."""
        acts, step, built, recipe, own = self.activations, self.optimizer, self.built, self.recipe, self.own
        on_host, earlier, copies = recipe.blocks_on_host, self.earlier_gradients, self.weight_copies
        cached = copies if acts.recomputes else 0  # until forward ends; otherwise kept with the blocks
        blocks = 0 if on_host else self.kept_by_blocks + copies - cached  # what all of them keep
        loss = blocks + self.kept_by_loss
        width, trains = SIZES[built.loose_dtype], recipe.trains_base
        # gradients gather in backward, unless each is stepped, moved away or added to an earlier one at once
        freed_early = step.in_backward or self.away or (earlier > 0 and not recipe.fsdp)
        outer = own.made if recipe.fsdp else sum(w.elements * width for w in built.outer if w.trained)
        head = own.made if recipe.fsdp else self.head_bytes * trains
        # the head's gradient from the start, and those of all weights at the end
        of_head = head if recipe.parameters_on_host or not freed_early else 0
        every = 0 if freed_early else self.gradient_bytes
        largest = max((w.size_bytes for w in built.in_blocks if w.trained), default=0)
        stepped = largest * (1 + step.share) if freed_early else 0  # of one weight at a time
        at_first = max(every - max(0, outer - of_head), stepped)  # in the backward of the first block
        table = built.shape.vocab * built.shape.hidden * width * trains  # of the embeddings, at the end
        at_end = table if freed_early else every + own.made - own.made // recipe.dp_shard
        tied = built.shape.tied and not recipe.by_row and not recipe.mixed  # it has a second gradient
        of_table = max(table * tied, table * step.share * step.in_backward) + own.reduced
        # compiled code adds up the rows of 16 bit in fp32 (torch/_decomp/decompositions.py)
        of_table += 2 * table if acts.compiled and width == 2 else 0
        logits = acts.dims.of("B·S·V") * acts.compute * recipe.whole_logits
        forward, backward, at = list[Moment](), list[Moment](), self._moment
        for block, (_, kept, again) in zip(built.shape.blocks, self.kept, strict=True):
            kind = f"block ({block.mixer}, {block.feed})"
            running = again or kept * on_host // recipe.forward_passes
            passing = acts.passing(block) + running + self.block.made + self.block.reduced
            last = (of_head + stepped, blocks, passing + self.made_again)
            first = (at_first, 0 if on_host else kept, passing)
            forward.append(at("forward", f"the last {kind}", self.gathered(3), 0, blocks, running + cached))
            backward.append(at("backward", f"the last {kind}", self.gathered(2), *last))
            backward.append(at("backward", f"the first {kind}", self.gathered(2), *first))
        held, begins = sum_of(acts.loss.at_end) + cached, sum_of(acts.loss.in_backward)
        of_head = logits + (head // 2 if copies else 0)
        gradients = step.gradient_bytes * (not self.away and not step.in_backward)
        gradients = self.gradient_bytes * (not self.away) if recipe.steps_on_host else gradients
        updating = 0 if recipe.steps_on_host or step.in_backward else step.step_bytes
        copied = 0 if recipe.steps_on_host else step.copy_bytes
        setup = {
            "parameters": self.device_parameters,
            "gradients": self.bucket_bytes,
            "optimizer_state": copied,
        }
        return [
            Moment("setup", "model built", dict.fromkeys(CATEGORIES, 0) | setup),
            *forward,
            at("forward", "the end of the loss", self.gathered(1), 0, loss, held),
            at("loss", "the gradient of the logits", own.weights, 0, loss, begins),
            *backward,
            at("backward", "the head", own.weights, head, blocks, of_head),
            at("backward", "the embeddings", 0, at_end, 0, of_table),
            at("optimizer_step", "update", 0, gradients - earlier, 0, updating),
        ]

    def _moment(self, phase: Phase, where: str, gathered: int, grads: int, kept: int, passing: int) -> Moment:
        """A moment, with what is there throughout the step added to what it has of its own: gathered weights,
        gradients, kept activations, and `passing` temporaries, all in bytes."""
        held = {
            "parameters": self.device_parameters,
            "gradients": grads + self.earlier_gradients + self.bucket_bytes,
            "optimizer_state": self.device_state,
            "activations": kept,
            "temporaries": passing,
            "inputs": self.input_bytes,
            "other": self.hardware.cublas_workspace_bytes,
            "gathered_parameters": gathered,
        }
        return Moment(phase, where, held)
