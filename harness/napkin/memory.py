"""What a steady step holds: the sizes of its parts, and the moments that can be its peak. No torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness.hardware import Hardware
from harness.napkin.activations import Activations
from harness.napkin.optimizer import OptimizerMemory
from harness.napkin.ranks import units_of
from harness.napkin.terms import sum_of
from harness.napkin.weights import SIZES, BuiltModel, total_bytes
from harness.step_profile import CATEGORIES

Phase = Literal["setup", "forward", "loss", "backward", "optimizer_step"]
"""`loss` is the first part of backward."""


@dataclass(frozen=True)
class Moment:
    """The bytes alive on the device at one moment of the step, by category."""

    phase: Phase
    where: str  # what the step is doing
    parameters: int
    gathered_parameters: int  # FSDP2's units that are whole, and their buffers
    gradients: int
    optimizer_state: int
    activations: int
    temporaries: int
    inputs: int = 0
    other: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)


class Sizes:
    """The sizes, in bytes, that the memory of one recipe on one device is made of. Each is computed once."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.hardware, self.recipe, self.units = built, hardware, built.recipe, units_of(built)
        recipe, self.outer, self.in_blocks = built.recipe, built.outer, built.in_blocks
        self.trained = [w for w in (*built.outer, *built.in_blocks) if w.trained]
        self.activations, self.optimizer = Activations(built, hardware), OptimizerMemory(recipe, self.trained)
        acts = self.activations
        self.micro_batches = recipe.gradient_accumulation_steps
        self.parameter_bytes = total_bytes([*self.outer, *self.in_blocks]) + built.buffer_bytes
        self.reference_bytes = self.parameter_bytes if recipe.copies_reference else 0  # as dpo's model was
        self.gradient_bytes = sum(w.count * w.elements * SIZES[w.dtype] for w in self.trained)
        self.bucket_bytes = self.gradient_bytes if recipe.ddp else 0  # gradient_as_bucket_view=False
        held = self.optimizer.state_bytes - self.optimizer.paged_bytes + self.optimizer.copy_bytes
        self.device_state = 0 if recipe.steps_on_host else held
        self.away = recipe.parameters_on_host or recipe.cpu_offload  # weights, whole or a rank's part of them
        self.head_bytes = built.head.elements * SIZES[built.loose_dtype]
        around = 2 * total_bytes(self.in_blocks) // built.shape.layers + self.head_bytes
        there = built.buffer_bytes if recipe.cpu_offload else around  # a block, the next, and the head
        self.device_parameters = (there if self.away else self.parameter_bytes) + self.reference_bytes
        self.input_bytes = self.activations.input_bytes
        budget = self.budget = recipe.activation_memory_budget
        self.kept: list[tuple[int, int, int]] = []
        """For each kind of block: how many there are, the bytes that one keeps until backward, and the bytes
        that it computes again in backward."""
        for block in built.shape.blocks:
            again = acts.recomputes * max(sum_of(acts.kept_by(block)) - sum_of(acts.made_once(block)), 0)
            again //= recipe.forward_passes
            self.kept.append((block.count, int(sum_of(acts.kept_until_backward(block)) * budget), again))
        self.kept_by_loss = int(sum_of(acts.kept_by_loss) * budget)
        self.kept_by_blocks = sum(n * kept for n, kept, _ in self.kept)
        whole = sum(block.count * sum_of(acts.kept_until_backward(block)) for block in built.shape.blocks)
        self.made_again = int(whole * (1 - budget))
        """With activation_memory_budget, what the compiled backward makes again of what blocks keep: all of
        it can be there at once, since the compiler orders backward as it likes."""
        quantized = (w.elements for w in self.in_blocks if w.quantized)
        self.quantizing_bytes = SIZES[built.made_dtype] * max(quantized, default=0)
        """The largest weight before it is quantized: in setup one layer at a time is whole."""
        in_fp8 = {matrix.name for _, matrix in built.matrices if built.in_fp8(matrix)}
        wide = [w for w in self.in_blocks if w.matrix and w.dtype == "fp32" and w.name not in in_fp8]
        stay = sum(w.elements * w.count for w in wide if w.trained or not acts.recomputes)
        stay *= 1 if acts.recomputes else recipe.forward_passes
        self.weight_copies = acts.compute * stay if recipe.mixed and not recipe.fsdp else 0
        """Autocast's 16-bit copies of fp32 weights. They are kept until backward, or with checkpointing until
        forward ends. Each pass of forward makes its own."""
        later = recipe.fsdp and recipe.syncs_per_step < self.micro_batches
        added = 0 if self.away or self.micro_batches == 1 else self.gradient_bytes
        unsynced = self.units.layers * self.units.reduced + self.units.own_reduced
        self.earlier_gradients = unsynced if later else added  # of earlier micro batches

    @property
    def host_parts(self) -> dict[str, int]:
        """The bytes that are offloaded to host memory, by part, each at its largest. Unified memory of paged
        optimizers is not among them."""
        step = self.optimizer
        states = {"gradients": step.gradient_bytes, "optimizer state": step.state_bytes + step.copy_bytes}
        parts = {"parameters": self.parameter_bytes} if self.away else {}
        if self.recipe.steps_on_host:
            parts |= {**states, "the optimizer's temporaries": step.step_bytes}
        return parts | ({"activations": self.kept_on_host} if self.recipe.blocks_on_host else {})

    @property
    def kept_on_host(self) -> int:
        """The bytes of what one micro batch keeps for backward in host memory."""
        kept = self.kept_by_blocks + self.kept_by_loss * self.recipe.activations_on_host
        return kept * self.recipe.blocks_on_host


def required_bytes(memory: "Memory") -> int:
    """The bytes that must fit on the device: the peak and the CUDA context. Fragmentation comes on top."""
    return memory.peak.total_bytes + memory.sizes.hardware.calibration.cuda_context_bytes


@dataclass(frozen=True)
class Memory:
    """The sizes of a recipe's step, and the moments that can be its peak, in order."""

    sizes: Sizes

    @property
    def peak(self) -> Moment:
        """The largest moment of the step. Setup is not part of the step."""
        return max(self.moments[1:], key=lambda moment: moment.total_bytes)

    @property
    def parts_at_peak(self) -> dict[str, int]:
        """The bytes of the peak by what they are, in words, the largest first. Tensors as large as the logits
        are apart from other activations and temporaries."""
        acts, peak = self.sizes.activations, self.peak
        held = {
            "the end of the loss": acts.held_after_forward,
            "the gradient of the logits": acts.held_in_backward,
        }
        now = held.get(peak.where)
        kept, passing = (
            sum_of(term for term in terms if "B·S·V" in term.formula)
            for terms in ((acts.kept_by_loss, now) if now is not None else ((), ()))
        )
        parts = {name.replace("_", " "): getattr(peak, name) for name in CATEGORIES}
        parts["activations"] -= kept
        parts["temporaries"] -= passing
        parts["logits with their copies and gradients"] = kept + passing
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @cached_property
    def moments(self) -> list[Moment]:
        """Setup, and then the moments of the step in order: any of them can be its peak."""
        sizes, acts, units, step = self.sizes, self.sizes.activations, self.sizes.units, self.sizes.optimizer
        built, recipe, earlier = sizes.built, sizes.recipe, sizes.earlier_gradients
        on_host, whole, own = recipe.blocks_on_host, bool(units.layers), units.own
        copies = sizes.weight_copies
        cached = copies if acts.recomputes else 0  # until forward ends; otherwise kept with the blocks
        blocks = 0 if on_host else sizes.kept_by_blocks + copies - cached  # what all of them keep
        loss = blocks + sizes.kept_by_loss
        width, trains = SIZES[built.loose_dtype], recipe.trains_base
        # gradients gather in backward, unless each is stepped, moved away or added to an earlier one at once
        freed_early = step.in_backward or sizes.away or (earlier > 0 and not whole)
        head = units.own_made if whole else sizes.head_bytes * trains
        outer = units.own_made if whole else sum(w.elements * width for w in sizes.outer if w.trained)
        # gradients of all weights at the end, and the head's from the start
        all_grads, of_head = (0, 0) if freed_early else (sizes.gradient_bytes, head)
        of_head = head if recipe.parameters_on_host else of_head
        largest = max((w.size_bytes for w in sizes.in_blocks if w.trained), default=0)
        stepped = largest * (1 + step.share) if freed_early else 0  # of one weight at a time
        grads_at_last = of_head + stepped  # in the backward of the last block, and then of the first
        grads_at_first = max(all_grads - max(0, outer - of_head), stepped)
        table = built.shape.vocab * built.shape.hidden * width * trains  # of the embeddings, at the end
        tied = built.shape.tied and not recipe.by_row
        tied_part = 0 if not tied or recipe.mixed else table  # the second gradient of a tied one
        grads_at_end = (
            table if freed_early else all_grads + units.own_made - units.own_made // recipe.dp_shard
        )
        # compiled code adds up the rows of 16 bit in fp32 (torch/_decomp/decompositions.py)
        summed_up = 2 * table if acts.compiled and width == 2 else 0
        temporaries_at_end = (
            max(tied_part, table * step.share * step.in_backward) + units.own_reduced + summed_up
        )
        logits = acts.dims.of("B·S·V") * acts.compute * recipe.whole_logits
        at, rows = self._moment, list[Moment]()  # bytes: gathered, gradients, activations, temporaries
        for block, (_, kept, again) in zip(built.shape.blocks, sizes.kept, strict=True):
            kind = f"block ({block.mixer}, {block.feed})"
            running = again or kept * on_host // recipe.forward_passes
            passing = acts.passing(block) + running + units.made + units.reduced
            kept_by_first, gathered = 0 if on_host else kept, units.gathered(2)
            rows += [
                at("forward", f"the last {kind}", units.gathered(3), 0, blocks, running + cached),
                at(
                    "backward",
                    f"the last {kind}",
                    gathered,
                    grads_at_last,
                    blocks,
                    passing + sizes.made_again,
                ),
                at("backward", f"the first {kind}", gathered, grads_at_first, kept_by_first, passing),
            ]
        held = sum_of(acts.held_after_forward) + cached
        rows += [
            at("forward", "the end of the loss", units.gathered(1), 0, loss, held),
            at("loss", "the gradient of the logits", own, 0, loss, sum_of(acts.held_in_backward)),
            at("backward", "the head", own, head, blocks, logits + (head // 2 if copies else 0)),
            at("backward", "the embeddings", 0, grads_at_end, 0, temporaries_at_end),
        ]
        rows.sort(key=lambda moment: ("forward", "loss", "backward").index(moment.phase))
        gradients = 0 if sizes.away else sizes.gradient_bytes if recipe.steps_on_host else step.gradient_bytes
        gradients *= not step.in_backward
        step_temporaries = 0 if recipe.steps_on_host or step.in_backward else step.step_bytes
        rows.append(at("optimizer_step", "update", 0, gradients - earlier, 0, step_temporaries))
        copied = 0 if recipe.steps_on_host else step.copy_bytes
        setup = Moment("setup", "model built", sizes.device_parameters, 0, sizes.bucket_bytes, copied, 0, 0)
        return [setup, *rows]

    def _moment(self, phase: Phase, where: str, gathered: int, grads: int, kept: int, passing: int) -> Moment:
        """A moment, with what is there throughout the step added to what it has of its own: gathered weights,
        gradients, kept activations, and `passing` temporaries, all in bytes."""
        sizes, workspaces = self.sizes, self.sizes.hardware.cublas_workspace_bytes
        grads += sizes.earlier_gradients + sizes.bucket_bytes
        held = sizes.device_parameters, gathered, grads, sizes.device_state, kept, passing
        return Moment(phase, where, *held, sizes.input_bytes, workspaces)
