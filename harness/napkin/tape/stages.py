"""A micro batch's forward pass as stages: embedding, first block, the other blocks, loss.

The first block differs: when the embeddings are frozen its input needs no gradient, so it keeps less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.attention import given_masks, masks_read
from harness.napkin.tape.blocks import block, embed, new_tape, rotary_tables
from harness.napkin.tape.loss import HeadAndLoss, head_and_loss
from harness.napkin.tape.tape import Op, Tape, Tensor, saved_storages, total_bytes


@dataclass(kw_only=True)
class Stage:
    """A piece of the model, `count` times in a row. What it keeps for backward depends on checkpointing."""

    name: str
    """For people alone."""
    tape: Tape
    count: int = 1
    entering: Tensor | None = None
    """The residual stream that the stage reads."""
    shared: list[Tensor] = field(default_factory=list[Tensor])
    """What all blocks read, counted once and elsewhere."""
    checkpointed: bool = False
    """It keeps its input only, and is computed again in backward."""

    @cached_property
    def kept_tensors(self) -> list[Tensor]:
        """What one of it keeps for backward when nothing is recomputed, without what all blocks share."""
        shared = {id(t.storage) for t in self.shared}
        return [t for t in saved_storages(self.tape.ops) if id(t) not in shared]

    @property
    def kept(self) -> int:
        """Bytes of `kept_tensors`."""
        return total_bytes(self.kept_tensors)

    @property
    def input_kept(self) -> Tensor | None:
        """The residual stream, if checkpointing keeps it."""
        return self.entering if self.checkpointed else None

    @property
    def saved(self) -> list[Tensor]:
        """What autograd keeps from forward to backward, in the order in which forward made it."""
        return [self.input_kept] if self.input_kept else self.kept_tensors

    @property
    def kept_until_backward(self) -> int:
        """Bytes kept from forward to backward: everything, or with checkpointing the input and what
        checkpointing does not reach."""
        return self.input_kept.size_bytes + self.kept_by_ctx if self.input_kept else self.kept

    @property
    def recomputed(self) -> Sequence[Op]:
        """The operators that run again in backward. That stops when the last tensor that forward kept is
        there again: a product keeps its factors before it runs, so a block's last one does not
        (torch/utils/checkpoint.py)."""
        if not self.checkpointed:
            return ()
        ops = self.tape.ops
        last = max((i for i, op in enumerate(ops) if op.saved or op.keeps_weight), default=-1)
        is_product = last >= 0 and ops[last].forward.kind == "matmul"
        return ops[: last if is_product else last + 1]

    @property
    def lost(self) -> int:
        """Bytes of what ranks sum while one of it is recomputed and nobody reads before that stops: PyTorch
        keeps what nobody waits for (torch/csrc/distributed/c10d/Functional.cpp)."""
        again = self.recomputed
        read = {id(t) for op in self.tape.ops[: len(again) + 1] for t in op.inputs}
        sums = [op.outputs[0] for op in again if op.forward_sent]
        return total_bytes([t for t in sums if id(t) not in read])

    @cached_property
    def kept_by_ctx(self) -> int:
        """Bytes of what stays on the device whatever is recomputed or offloaded (Op.kept_by_ctx)."""
        return total_bytes(list(self._in_ctx.values()))

    @cached_property
    def kept_twice(self) -> int:
        """Bytes of those that autograd keeps too: recomputing makes them a second time."""
        ops = self.tape.ops
        seen = {id(t.storage): t.storage for op in ops for t in op.saved if t not in op.kept_by_ctx}
        return total_bytes([t for key, t in seen.items() if key in self._in_ctx])

    @property
    def _in_ctx(self) -> dict[int, Tensor]:
        return {id(t.storage): t.storage for op in self.tape.ops for t in op.kept_by_ctx}


@dataclass(kw_only=True)
class Stages:
    """All stages of one micro batch."""

    batch: list[Tensor]
    """What the data loader hands over: ids, labels, and what packing adds to them."""
    embedding: Stage
    blocks: list[Stage]
    """The first block and, if there are more, the rest; in forward order."""
    loss: Stage
    head: HeadAndLoss
    """The parts of `loss`."""
    tables: list[Tensor]
    """Rotary cosines and sines, which every block reads and keeps."""
    masks: list[Tensor]
    """Attention masks made in forward; a packed batch brings its own."""
    kept_masks: list[Tensor]
    """Of the masks that blocks read, what they keep as it is: once for all of them."""

    @property
    def all(self) -> list[Stage]:
        return [self.embedding, *self.blocks, self.loss]


def build_stages(built: BuiltModel, compute_capability: float, gpu_threads: int) -> Stages:
    """The stages of `built` on a GPU of `compute_capability` (it decides which attention kernel runs) that
    holds `gpu_threads` at once (they decide among how many blocks a sum is divided)."""
    shape, packed, checkpointed = built.shape, built.recipe.packing, built.recipe.gradient_checkpointing
    tape = new_tape(built, gpu_threads)
    x = embed(tape, built)
    if checkpointed:
        x.grad = True  # peft makes the embeddings' output require a gradient, for checkpointing's sake
    given = given_masks(tape, built, x) if packed else None
    masks = masks_read(tape, built, x, given)
    tables = rotary_tables(tape, "B S" if packed else "S", x)
    names = ["input_ids", "labels", *(["position_ids"] if packed else [])]
    blocks: list[Stage] = []
    for name, count in [("first block", 1), ("block", shape.layers - 1)][: min(shape.layers, 2)]:
        of_block = new_tape(built, gpu_threads)
        of_block.hooked |= checkpointed
        entering = of_block.tensor("block input", "B S H", x.dtype, grad=x.grad)
        x = block(of_block, built, entering, tables, masks[0] if masks else None, compute_capability)
        blocks.append(
            Stage(
                name=name,
                tape=of_block,
                count=count,
                entering=entering,
                shared=[*tables, *masks],
                checkpointed=checkpointed,
            )
        )
    head = head_and_loss(built, x.dtype, x.grad, compute_capability, gpu_threads)
    saved = {id(t) for t in saved_storages(blocks[-1].tape.ops)}
    return Stages(
        batch=[*(tape.tensor(name, "B S", "int64") for name in names), *(given or [])],
        embedding=Stage(name="embedding", tape=tape),
        blocks=blocks,
        loss=Stage(name="loss", tape=head.tape, entering=head.entering),
        head=head,
        tables=list(tables) if shape.rotary_dim else [],
        masks=[] if packed else masks,
        kept_masks=[mask for mask in masks if id(mask) in saved],
    )
