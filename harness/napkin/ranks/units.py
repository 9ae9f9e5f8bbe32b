"""FSDP2's units: layers whose weights are gathered together, and when a rank holds them whole. No torch.

The order of events is torch/distributed/fsdp/_fully_shard's (2.13). A unit is gathered into one flat buffer,
which is then copied into its weights. In forward that buffer lives until the next unit is copied out of its
own, or forward ends: the next gather overlaps the copy (_fsdp_param_group.py, wait_for_unshard). In backward
it is freed at once, but the unit that comes next is gathered ahead (_backward_prefetch). A unit's gradients
are whole until they lie in the input of its reduce-scatter, which lives until the next unit's gradients are
there (post_backward). What is in no other unit is the model's own: gathered first, and whole until backward
ends, when it is reduced (_fsdp_state.py, _root_post_backward_final_callback).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.weights import Weight
from harness.napkin.ranks.parts import part_of, whole_bytes
from harness.recipe import Recipe


@dataclass(frozen=True)
class Unit:
    """Bytes of the layers that are gathered together."""

    weights: int = 0
    """Whole, in the dtype in which they compute."""
    gradients: int = 0
    """Of the trained ones, whole, as backward makes them."""
    reduced: int = 0
    """The input of their reduce-scatter."""
    part: int = 0
    """A rank's gradients."""
    output: int = 0
    """What the reduce-scatter makes: a rank's gradients, and before them the same in another dtype."""
    accumulated: int = 0
    """Gradients of earlier micro batches, whole, that were not reduced."""
    last: int = 0
    """Of the last weight: foreach_reduce still names its gradient when the others' are gone."""


class Units:
    """The units of a model on `recipe.dp_shard` ranks, and what of them is whole at each stage."""

    def __init__(
        self,
        recipe: Recipe,
        outer: Sequence[Weight],
        in_blocks: Sequence[Weight],
        *,
        tied: bool,
        micro_batches: int,
        on_host: bool,
    ) -> None:
        """`on_host`: a rank's parts live in host memory."""
        self.micro_batches, self.on_host = micro_batches, on_host
        self.recipe, self.layers = recipe, max((w.count for w in in_blocks), default=1)
        self.block = self._unit(in_blocks, each=True)
        apart = recipe.head_apart and not tied
        # accelerate (fsdp2_prepare_model) and transformers (distributed/fsdp.py): the embeddings are a unit,
        # and the last norm with the head another, which is kept; tied, all three are one, kept throughout
        last = "lm_head" if not tied else "embed_tokens" if recipe.head_apart else ""
        self.embeddings = self._unit([w for w in outer if apart and "embed" in w.name], last="embed_tokens")
        self.tail = self._unit([w for w in outer if apart and "embed" not in w.name], last=last)
        self.own = self._unit([w for w in outer if not apart], last=last)
        larger = [w for w in outer if w.trained and w.larger_gradient]
        self.cut_out = sum(w.elements * SIZES[gathered_dtype(recipe) or w.dtype] for w in larger)
        """Of gradients larger than their weights, what enters the reduction: a copy (unsharded_grad_data)."""

    def _unit(self, weights: Iterable[Weight], *, each: bool = False, last: str = "") -> Unit:
        """The unit of `weights`: all of each kind, or for a block one of each, whose last is small."""
        recipe, ranks = self.recipe, self.recipe.dp_shard
        computes = gathered_dtype(recipe)
        sums = dict.fromkeys(Unit.__dataclass_fields__, 0)
        for weight in weights:
            count = 1 if each else weight.count
            sums["weights"] += count * whole_bytes(weight, ranks, computes)
            if not weight.trained:
                continue
            made_in = computes or weight.dtype
            reduced_in = recipe.reduce_dtype or made_in
            elements = whole_bytes(weight, ranks, "fp32") // SIZES["fp32"]
            sums["gradients"] += count * weight.elements * SIZES[made_in]
            sums["reduced"] += count * elements * SIZES[reduced_in]
            whole = weight.elements * SIZES[made_in]
            part, other = part_of(weight, ranks).size_bytes, elements // ranks * SIZES[reduced_in]
            sums["part"] += count * part
            sums["output"] += count * (part + (other if reduced_in != weight.dtype else 0))
            if recipe.syncs_per_step < self.micro_batches:
                whole = weight.gradient_elements * SIZES[reduced_in]
                sums["accumulated"] += count * whole
            if weight.name == last:
                sums["last"] = whole
        return Unit(**sums)

    @property
    def kept(self) -> bool:
        """Whether units stay whole from forward to backward."""
        return not self.recipe.reshard_after_forward

    @property
    def accumulates(self) -> bool:
        """Whether backward adds into whole gradients of earlier micro batches, which have the dtype it makes
        (FSDPParam.to_accumulated_grad_if_needed moves others away)."""
        unit = self.block if self.block.gradients else self.own
        return 0 < unit.accumulated == unit.gradients

    def flat(self, unit: Unit) -> int:
        """The buffer that a unit is gathered into. A single rank copies its weights without one."""
        return unit.weights if self.recipe.dp_shard > 1 else 0

    # what is gathered, stage by stage -------------------------------------------------------------------

    def after_embeddings(self) -> int:
        """In forward, while the first block is copied."""
        buffer = self.own.weights + self.embeddings.weights  # one of the two, or both are there
        stays = self.own.weights + self.kept * self.embeddings.weights
        return stays + self._copying(Unit(buffer), self.block)

    def before_block(self) -> int:
        """In forward, while the last block is copied: the buffer of the one before it is still there."""
        before = self.block if self.layers > 1 else Unit(self.own.weights + self.embeddings.weights)
        return self._stays() - self.kept * self.block.weights + self._copying(before, self.block)

    def in_block(self) -> int:
        """In forward, at the last block: it, and its buffer."""
        return self._stays() + (0 if self.kept else self.block.weights) + self.flat(self.block)

    def before_tail(self) -> int:
        """In forward, while the last norm and the head are copied."""
        return self._stays() + self._copying(self.block, self.tail)

    def at_loss(self) -> int:
        """At the end of forward: beside what stays, the buffer of the unit that was gathered last."""
        last = self.tail if self.tail.weights else self.block
        return self._stays() + self.tail.weights + self.flat(last)

    def _copying(self, before: Unit, unit: Unit) -> int:
        """While a unit is copied out of its buffer, wait_for_unshard still names the buffer before it."""
        return self.flat(before) + self.flat(unit) + unit.weights

    def after_forward(self) -> int:
        """Whole between forward and backward."""
        return self._stays() + self.tail.weights

    def _stays(self) -> int:
        """Whole from its forward to its backward: the model's own, and with `kept` all before the loss."""
        return self.own.weights + self.kept * (self.embeddings.weights + self.layers * self.block.weights)

    def in_backward(self, index: int) -> int:
        """In the backward of the block `index`, counted from the first; -1 is the embeddings', `layers` the
        head's."""
        if index == self.layers:
            return self.after_forward() + self.ahead_of_last_block()
        return self._around_block(index) if index >= 0 else self.own.weights + self.embeddings.weights

    def ahead_of_last_block(self) -> int:
        """The last block's buffer, before its backward begins."""
        return 0 if self.kept else self.flat(self.block)

    def _around_block(self, index: int) -> int:
        """In its backward: the block, and the unit before it gathered ahead."""
        if self.kept:
            return self.own.weights + self.embeddings.weights + (index + 1) * self.block.weights
        before = self.flat(self.block if index else self.embeddings)
        return self.own.weights + self.block.weights + before

    # gradients ------------------------------------------------------------------------------------------

    def being_reduced(self, index: int) -> int:
        """The input of a reduce-scatter that is under way in the backward of the block `index`, as above."""
        if index == self.layers:
            return 0
        return self.tail.reduced if index == self.layers - 1 else self.block.reduced

    def left_by(self, unit: Unit) -> int:
        """Bytes of gradients that a unit's reduction leaves, less whole ones that it takes away."""
        first = self.micro_batches == 1 or bool(unit.accumulated)
        stays = first and not self.on_host
        # hybrid: what is summed across groups lives until backward ends (FSDPParamGroup._all_reduce_state)
        summed = unit.output - unit.part if self.recipe.dp_replicate > 1 else 0
        return (unit.part if stays else 0) + summed - unit.accumulated

    @staticmethod
    def while_reducing(unit: Unit) -> int:
        """Bytes of gradients beside those of earlier micro batches and the input of their reduce-scatter: all
        of them whole, then the last of them with its output."""
        made = 0 if unit.accumulated else unit.gradients
        return max(made, unit.last + unit.output - unit.accumulated)

    @property
    def last(self) -> Unit:
        """The unit that is reduced when backward has ended."""
        return self.own if self.own.weights else self.embeddings

    @property
    def accumulated(self) -> int:
        """Whole gradients of earlier micro batches, all of them."""
        around = sum(unit.accumulated for unit in (self.own, self.embeddings, self.tail))
        return around + self.layers * self.block.accumulated


def gathered_dtype(recipe: Recipe) -> str | None:
    """The dtype units are gathered and computed in, and gradients made in: that of a mixed precision
    (MixedPrecisionPolicy.param_dtype), else None, each weight's own."""
    return recipe.compute_dtype if recipe.mixed else None


def as_computed(built: BuiltModel) -> BuiltModel:
    """The model as its operators see it: under FSDP2's mixed precision gathered weights and their gradients
    have the dtype of computing, without autocast."""
    recipe = built.recipe
    if not (recipe.fsdp and recipe.mixed):
        return built
    plain = {"precision": recipe.compute_dtype, "adapter_dtype": "base"}
    return BuiltModel(recipe.model_copy(update=plain), built.whole)
