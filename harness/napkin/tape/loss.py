"""The end of a micro batch's forward pass: final norm, output head and loss, stock or fused."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.hardware import Work
from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.blocks import new_tape
from harness.napkin.tape.linear import linear
from harness.napkin.tape.ops import cast, norm, scale
from harness.napkin.tape.tape import Op, Tape, Tensor


@dataclass(frozen=True)
class FusedLoss:
    """What a loss that works on chunks of tokens takes beside its tape, all of it in forward."""

    gradient_bytes: int
    """Gradients that it computes in forward and keeps: of the hidden states and the head."""
    temporary_bytes: int
    """The chunk of logits it works on, and copies of the head."""
    work: Work
    """Logits and their gradients, of one micro batch."""


@dataclass(frozen=True)
class HeadAndLoss:
    """Final norm, output head and loss."""

    tape: Tape
    entering: Tensor
    """The residual stream, B S H."""
    hidden: Tensor
    """What the output head reads."""
    head: list[Op] = field(default_factory=list[Op])
    """The operators of the output head."""
    held: list[Tensor] = field(default_factory=list[Tensor])
    """What local variables hold when forward ends: hidden states, logits, their fp32 copy."""
    fused: FusedLoss | None = None


def head_and_loss(
    built: BuiltModel, dtype: str, grad: bool, compute_capability: float, gpu_threads: int
) -> HeadAndLoss:
    """The end of the model on a residual stream of `dtype`; `grad`: it needs a gradient."""
    tape = new_tape(built, gpu_threads)
    entering = tape.tensor("block input", "B S H", dtype, grad=grad)
    hidden = norm(tape, built, entering, "final norm")
    if built.recipe.loss == "fused_linear":
        fused = _fused(tape, built, hidden, compute_capability)
        return HeadAndLoss(tape, entering, hidden, held=[hidden], fused=fused)
    before = len(tape.ops)
    logits = linear(tape, built, hidden, built.head, "logits", "B S V")
    head = tape.ops[before:]
    if built.shape.logit_softcap:
        logits = scale(tape, logits, "logits / cap")
        logits = tape.op("tanh of logits", "B S V", logits.dtype, [logits], keeps_output=True)
        logits = scale(tape, logits, "logits capped")
    wide = cast(tape, logits, "fp32")  # transformers/loss/loss_utils.py
    cross_entropy(tape, wide)
    held = [hidden, logits] if wide is logits else [hidden, logits, wide]
    return HeadAndLoss(tape, entering, hidden, head, held)


def cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """torch.nn.functional.cross_entropy: log_softmax keeps its result, the likelihood that and the labels."""
    log_probabilities = tape.op("log-probabilities", "B S V", logits.dtype, [logits], keeps_output=True)
    labels = tape.tensor("shifted labels", "L", "int64")
    count = tape.tensor("number of labels", "", "fp32")
    saves = [log_probabilities, labels, count]
    return tape.op("loss", "", "fp32", [log_probabilities], saves, looks_up=True)


def _fused(tape: Tape, built: BuiltModel, hidden: Tensor, compute_capability: float) -> FusedLoss:
    """Liger's fused linear cross-entropy: logits for a chunk of tokens at a time, as many as make the
    chunk about as large as the hidden states, and both gradients at once
    (liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py)."""
    shape, trained, dtype = built.shape, built.trains_base, built.linear_dtype(built.head)
    tokens, weight = tape.elements("T"), shape.vocab * shape.hidden
    compute = tape.autocast or hidden.dtype
    parts = -(-shape.vocab // shape.hidden)
    chunk = min(1 << (-(-tokens // parts) - 1).bit_length(), tokens)
    temporary = chunk * shape.vocab * SIZES[compute]
    if compute != dtype:
        # the head is cast for every chunk's logits, and for the first chunk's gradient: that cast is cached
        temporary += (1 + trained) * weight * SIZES[compute]
    if trained and compute == "fp32":  # added up out of place
        temporary += weight * SIZES["fp32"]
    elif trained and compute_capability < 8:  # and in fp32
        temporary += weight * (SIZES[compute] + SIZES["fp32"])
    products = 2 + trained
    # every chunk reads the head twice, casts it first if need be, and adds to all of the head's gradient
    head = 2 * SIZES[compute] + (2 * SIZES[dtype] if trained else 0)
    head += SIZES[dtype] + SIZES[compute] if compute != dtype else 0
    moved = 3 * tokens * shape.vocab * SIZES[compute] + -(-tokens // chunk) * head * weight
    return FusedLoss(
        gradient_bytes=hidden.size_bytes + (weight * SIZES[dtype] if trained else 0),
        temporary_bytes=temporary,
        work=Work(products * 2 * tokens * weight, moved, 8, "matmul", compute),
    )
