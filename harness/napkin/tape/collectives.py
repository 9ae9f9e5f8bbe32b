"""What the ranks that share a layer tell each other, as operators on a tape (tensor parallelism). No torch.

torch/distributed/tensor/parallel/style.py divides a layer, and DTensor's functional collectives give each
result memory of its own (torch/distributed/_functional_collectives.py).
"""

from __future__ import annotations

from harness.napkin.tape.tape import Op, Tape, Tensor


def ring(ranks: int) -> float:
    """Share of a buffer that each of `ranks` sends in a ring all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def read_by_ranks(tape: Tape, x: Tensor) -> Tensor:
    """An input that every rank's part of a layer reads whole. Backward sums its gradients over the ranks, of
    each layer apart."""
    view = tape.tensor(x.name, x.dims, x.dtype, grad=x.grad, base=x)
    sent = 2 * ring(tape.ranks) * x.size_bytes if x.grad else 0.0
    tape.ops.append(Op(name=f"{x.name} to ranks", inputs=(x,), outputs=(view,), backward_sent=sent))
    return view


def summed_over_ranks(tape: Tape, part: Tensor) -> Tensor:
    """The sum of what each rank made of its inputs (an all-reduce). Backward passes the gradient on."""
    out = tape.op(f"{part.name} summed", part.dims, part.dtype, [part], passes_gradient=True)
    tape.ops[-1].forward_sent = 2 * ring(tape.ranks) * part.size_bytes
    return out


def gathered(tape: Tape, part: Tensor, dims: str) -> Tensor:
    """All outputs, `dims`, from each rank's (an all-gather), which come rank by rank and are put in order.
    Backward takes the rank's own out of the gradient."""
    by_rank = tape.op(f"{part.name} gathered", dims, part.dtype, [part])
    tape.ops[-1].forward_sent = ring(tape.ranks) * by_rank.size_bytes
    out = tape.op(f"{part.name} in order", dims, part.dtype, [by_rank], passes_gradient=True)
    tape.hold(part)
    return out
