"""A micro batch's forward pass as stages: embedding, first block, the other blocks, loss.

The first block differs: when the embeddings are frozen its input needs no gradient, so it keeps less.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.blocks import block, embed, head, new_tape, rotary_tables, standard_loss
from harness.napkin.tape.tape import Tape, Tensor, saved_storages, total_bytes


@dataclass
class Stage:
    """A piece of the model, `count` times in a row."""

    name: str
    tape: Tape
    count: int
    entering: Tensor | None = None
    """The residual stream that the stage reads; gradient checkpointing keeps it."""

    shared: list[Tensor] = field(default_factory=list)

    @cached_property
    def kept_tensors(self) -> list[Tensor]:
        """What one of it keeps for backward when nothing is recomputed, without what all blocks share."""
        shared = {id(t.storage) for t in self.shared}
        return [t for t in saved_storages(self.tape.ops) if id(t) not in shared]

    @property
    def kept(self) -> int:
        """Bytes of `kept_tensors`."""
        return total_bytes(self.kept_tensors)

    @cached_property
    def pinned(self) -> int:
        """Bytes of those that stay on the device whatever is recomputed or offloaded."""
        return total_bytes(
            list({id(t.storage): t.storage for op in self.tape.ops for t in op.pinned}.values())
        )

    @cached_property
    def kept_twice(self) -> int:
        """Bytes of pinned tensors that autograd keeps too: recomputing makes those a second time."""
        pinned = {id(t.storage) for op in self.tape.ops for t in op.pinned}
        seen = {id(t.storage): t.storage for op in self.tape.ops for t in op.saved if t not in op.pinned}
        return total_bytes([t for key, t in seen.items() if key in pinned])


@dataclass
class Stages:
    """All stages of one micro batch."""

    embedding: Stage
    blocks: list[Stage]
    """The first block and, if there are more, the rest; in forward order."""
    loss: Stage
    hidden: Tensor
    """What the output head reads."""
    tables: list[Tensor] = field(default_factory=list)
    """Rotary cosines and sines, which every block reads and keeps."""
    masks: list[Tensor] = field(default_factory=list)
    """Explicit attention masks made in forward."""
    fused_loss_bytes: int = 0
    """Gradients that a fused loss computes in forward and keeps: of the hidden states and the head."""
    fused_chunks: int = 0
    """How many chunks of tokens a fused loss works on, one after the other."""
    fused_temporary_bytes: int = 0
    """The chunk of logits a fused loss works on."""

    @property
    def all(self) -> list[Stage]:
        return [self.embedding, *self.blocks, self.loss]


def build_stages(built: BuiltModel, compute_capability: float) -> Stages:
    """The stages of `built` on a GPU of `compute_capability` (it decides which attention kernel runs)."""
    shape = built.shape
    tape = new_tape(built)
    x = embed(tape, built)
    if built.recipe.gradient_checkpointing:
        x.grad = True  # peft makes the embeddings' output require a gradient, for checkpointing's sake
    embedding = Stage("embedding", tape, 1)
    tables = rotary_tables(tape, built, x)
    masks = _masks(tape, built, x)
    shared = [*tables, *masks]
    blocks: list[Stage] = []
    counts = [1, shape.layers - 1] if shape.layers > 1 else [1]
    for count in counts:
        tape = new_tape(built)
        entering = tape.tensor("block input", "B S H", x.dtype, grad=x.grad)
        x = block(tape, built, entering, tables, masks[0] if masks else None, compute_capability)
        blocks.append(Stage("first block" if not blocks else "block", tape, count, entering, shared))
    loss, hidden = _loss(built, x)
    stages = Stages(embedding, blocks, loss, hidden, list(tables) if shape.rotary_dim else [], masks)
    if built.recipe.loss == "fused_linear":
        _fuse(built, stages, compute_capability)
    return stages


def _loss(built: BuiltModel, x: Tensor) -> tuple[Stage, Tensor]:
    tape = new_tape(built)
    entering = tape.tensor("block input", "B S H", x.dtype, grad=x.grad)
    hidden = head(tape, built, entering)
    if built.recipe.loss == "standard":
        standard_loss(tape, built, hidden)
    return Stage("loss", tape, 1, entering), hidden


def _fuse(built: BuiltModel, stages: Stages, compute_capability: float) -> None:
    """Liger's fused linear cross-entropy: logits for a chunk of tokens at a time, as many as make the
    chunk about as large as the hidden states, and both gradients at once
    (liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py)."""
    tape, shape, hidden = stages.loss.tape, built.shape, stages.hidden
    tokens = tape.elements("B S")
    compute = tape.autocast or hidden.dtype
    parts = -(-shape.vocab // shape.hidden)
    chunk = min(1 << (-(-tokens // parts) - 1).bit_length(), tokens)
    stages.fused_chunks = -(-tokens // chunk)
    weight = shape.vocab * shape.hidden
    stages.fused_loss_bytes = hidden.size_bytes + (
        weight * SIZES[built.loose_dtype] if built.trains_base else 0
    )
    stages.fused_temporary_bytes = chunk * shape.vocab * SIZES[compute]
    if compute != built.loose_dtype:
        # the head is cast for every chunk's logits, and for the first chunk's gradient: that cast is cached
        stages.fused_temporary_bytes += (1 + built.trains_base) * weight * SIZES[compute]
    if built.trains_base and compute == "fp32":  # added up out of place
        stages.fused_temporary_bytes += weight * SIZES["fp32"]
    elif built.trains_base and compute_capability < 8:  # and in fp32
        stages.fused_temporary_bytes += weight * (SIZES[compute] + SIZES["fp32"])


def _masks(tape: Tape, built: BuiltModel, x: Tensor) -> list[Tensor]:
    """Explicit attention masks: eager's additive one, sdpa's bool one for a window or packed documents.

    A compiled model has one always: while it is traced, masking_utils.py cannot leave sdpa's out.
    """
    recipe, shape = built.recipe, built.shape
    if recipe.attention.startswith("flash_attention"):
        return []
    windowed = (
        shape.sliding_window is not None and shape.sliding_layers and shape.sliding_window < recipe.seq_len
    )
    kinds = 2 if shape.family == "gemma2" and not recipe.packing else 1
    if recipe.attention == "eager":
        return [tape.tensor("mask", "M S S", x.dtype) for _ in range(kinds)]
    if recipe.compile:
        return [tape.tensor("mask", "M S S", tape.autocast or x.dtype)]
    if recipe.packing or windowed:  # without packing every row has the same mask, kept once
        mask = tape.tensor("mask", "M S S" if recipe.packing else "S S", "bool")
        return [mask]
    return []
