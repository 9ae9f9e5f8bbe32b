"""The operators of a piece of a model, in order: what each computes, moves, and keeps for backward.

A tape is arithmetic on sizes: no torch and no values. What an operator keeps is PyTorch's rule for it
(tools/autograd/derivatives.yaml): a product keeps a factor only if the other factor needs a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from harness.hardware import Work
from harness.napkin.dtypes import SIZES

NOTHING = Work(operators=0)


@dataclass(eq=False)
class Tensor:
    """A tensor by name, which is for people alone, and size. `dims` are letters of napkin/tape/dims.py, as in
    "B S H"; a view has the `base` it looks into."""

    name: str
    dims: str
    dtype: str
    size_bytes: int
    grad: bool
    """Backward sends a gradient to it."""
    base: Tensor | None = None
    sources: tuple[Tensor, ...] = ()
    """What a compiled model would recompute it from; empty: it must be kept itself."""

    @property
    def storage(self) -> Tensor:
        """The tensor that owns the memory."""
        return self if self.base is None else self.base.storage


@dataclass(eq=False, kw_only=True)
class Op:
    """One operator, its result, and its share of backward."""

    name: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor, ...] = ()
    """What it keeps for backward (weights and inputs of the model apart)."""
    kept_by_ctx: tuple[Tensor, ...] = ()
    """Of those, what it keeps in attributes of its ctx, where no hook of autograd sees it: gradient
    checkpointing does not free it, offloading does not move it, and it lives as long as the loss."""
    holds: tuple[Tensor, ...] = ()
    """What local variables, or others, do not let go of before this one has run."""
    forward: Work = NOTHING
    backward: Work = NOTHING
    passes_gradient: bool = False
    """Its input's gradient is its output's gradient, not a new tensor (addition, views)."""
    keeps_weight: bool = False
    """It keeps a weight, whose memory is counted as a parameter."""
    weight_gradient_bytes: int = 0
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    forward_sent: float = 0.0
    """Bytes that a rank sends to those it shares a layer with, while the operator runs."""
    backward_sent: float = 0.0


@dataclass
class Tape:
    """Records operators. `sizes` maps the symbols in dims to numbers."""

    sizes: dict[str, int]
    autocast: str | None = None
    """The dtype autocast runs matrix products in; None without autocast."""
    gpu_threads: int = 0
    """Threads that the whole GPU holds at once."""
    hooked: bool = False
    """Hooks of autograd give back what was kept, as checkpointing's and offloading's do: it is gone when the
    operator has run, before its gradients are summed to their shapes (torch/csrc/autograd/engine.cpp)."""
    caches_casts: bool = True
    """Autocast keeps its copies of trained weights; of weights that visit from host memory it cannot."""
    compiled: bool = False
    """Elementwise operators fuse: they move nothing of their own, and keep only what cannot be recomputed."""
    ranks: int = 1
    """That share every layer (tensor parallelism)."""
    cached: list[Tensor] = field(default_factory=list[Tensor])
    """16-bit copies of trained weights that autocast's cache holds until the forward pass ends."""
    attention_kernel: str = ""
    """The kernel that attention on this tape runs."""
    ops: list[Op] = field(default_factory=list[Op])
    casts: dict[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])
    """In a compiled model a tensor is cast to a dtype once, by the tensor's id and the dtype."""

    def elements(self, dims: str) -> int:
        """The number of elements that dims describe."""
        return prod(self.sizes[symbol] for symbol in dims.split())

    def tensor(
        self, name: str, dims: str, dtype: str, *, grad: bool = False, base: Tensor | None = None
    ) -> Tensor:
        """A tensor that no operator on this tape computes: an input, a mask, a statistic."""
        return Tensor(name, dims, dtype, self.elements(dims) * SIZES[dtype], grad, base)

    def op(
        self,
        name: str,
        dims: str,
        dtype: str,
        inputs: Sequence[Tensor],
        saves: Sequence[Tensor | None] = (),
        *,
        keeps_output: bool = False,
        passes_gradient: bool = False,
        recomputable: bool = True,
        looks_up: bool = False,
        gathers: bool = False,
        temporary_bytes: int = 0,
        workspace_bytes: int = 0,
        passes: tuple[int, int] | None = None,
    ) -> Tensor:
        """Record an elementwise operator or a reduction, and return its result.

        `saves` are the tensors it keeps if backward will visit it; None entries are skipped. `looks_up`: it
        reads as much of its input as it returns, and backward none. `gathers`: its result's rows are its
        input's in another order, and backward adds theirs to zeros. `temporary_bytes` come and go within
        its backward, and so do `workspace_bytes`, of which next to nothing is written. `passes`: how often
        it goes over the bytes of its result, forward and backward, where it is several operators in truth.
        """
        out = self.tensor(name, dims, dtype, grad=any(t.grad for t in inputs))
        if self.compiled and recomputable:
            out.sources = tuple(self._recomputed(inputs))
        saved = self._recomputed([t for t in saves if t is not None] + ([out] if keeps_output else []))
        kept = self._kept(saved)
        moved = out.size_bytes + (out.size_bytes if looks_up else total_bytes(inputs))
        # each gradient is made from the result's and from what was kept; passed on, it is cast at most
        made = [t for t in inputs if t.grad and not (passes_gradient and t.dtype == out.dtype)]
        back = sum(out.size_bytes + t.size_bytes for t in made) + 2 * temporary_bytes
        back += 0 if looks_up else total_bytes(kept)
        back += 2 * total_bytes(made) if gathers else 0
        if len(inputs) > 1 and not passes_gradient:  # multiplied by a wider one, then cast
            back += 2 * sum(out.size_bytes for t in made if t.dtype != out.dtype)
        if passes is not None:
            moved, back = (times * out.size_bytes for times in passes)
        if self.compiled:
            moved = back = 0
        self._record(
            Op(
                name=name,
                inputs=tuple(inputs),
                outputs=(out,),
                saved=kept,
                forward=Work(0, moved),
                backward=Work(0, back, len(made)) if made else NOTHING,
                passes_gradient=passes_gradient,
                backward_temporary_bytes=temporary_bytes + workspace_bytes,
            )
        )
        return out

    def product(
        self,
        name: str,
        dims: str,
        dtype: str,
        inputs: Sequence[Tensor],
        saves: Sequence[Tensor | None],
        flops: int,
        *,
        kind: Literal["matmul", "attention"] = "matmul",
        weight_bytes: int = 0,
        keeps_output: bool = False,
        keeps_weight: bool = False,
        weight_gradient_bytes: int = 0,
        forward_temporary_bytes: int = 0,
        backward_temporary_bytes: int = 0,
        before_bytes: int = 0,
        added_bytes: int = 0,
        keeps_in_ctx: bool = False,
        holds: Sequence[Tensor] = (),
    ) -> Tensor:
        """Record a matrix product (of an activation and a weight, or of two activations) or an attention.

        `flops` are forward's. Backward does as many for each operand that needs a gradient; attention five
        products for forward's two, since it computes the scores again (arXiv 2205.14135, algorithm 4).
        Temporaries are written and read once. `before_bytes` are moved before each product, `added_bytes` are
        of what forward adds the product to.
        """
        out = self.tensor(name, dims, dtype, grad=bool(weight_gradient_bytes) or any(t.grad for t in inputs))
        moved = total_bytes(inputs) + weight_bytes + out.size_bytes
        operands = sum(t.grad for t in inputs) + bool(weight_gradient_bytes)
        extra = 2 * backward_temporary_bytes
        if kind == "attention":
            backward = Work(flops * 5 // 2, 2 * moved + extra, 1, kind, dtype)
        else:
            backward = Work(flops * operands, moved * operands + extra, operands, kind, dtype, before_bytes)
        moved += 2 * forward_temporary_bytes + added_bytes
        saved = self._kept([t for t in saves if t is not None] + ([out] if keeps_output else []))
        self._record(
            Op(
                name=name,
                inputs=tuple(inputs),
                outputs=(out,),
                saved=saved,
                kept_by_ctx=saved if keeps_in_ctx else (),
                holds=tuple(holds),
                forward=Work(flops, moved, 1, kind, dtype, before_bytes),
                backward=backward if out.grad else NOTHING,
                keeps_weight=keeps_weight and out.grad,
                weight_gradient_bytes=weight_gradient_bytes,
                forward_temporary_bytes=forward_temporary_bytes,
                backward_temporary_bytes=backward_temporary_bytes,
            )
        )
        return out

    def hold(self, *tensors: Tensor) -> None:
        """Local variables of what has just ended had these until now."""
        self.ops[-1].holds += tensors

    def weight_cast(self, name: str, size_bytes: int, copy_bytes: int, *, trained: bool) -> None:
        """Record a 16-bit copy of a weight; if that is trained, backward casts its gradient back."""
        work = Work(0, size_bytes + copy_bytes)
        copy = Tensor(name, "", "", 0, trained)  # its memory is counted elsewhere
        self._record(Op(name=name, outputs=(copy,), forward=work, backward=work if trained else NOTHING))

    def split(self, whole: Tensor, parts: Sequence[tuple[str, str]]) -> list[Tensor]:
        """Views of `whole`, one for each (name, dims); backward gathers their gradients into one tensor."""
        views = tuple(self._view(whole, name, dims) for name, dims in parts)
        gather = Work(0, 2 * whole.size_bytes) if whole.grad else NOTHING
        self._record(Op(name="split", inputs=(whole,), outputs=views, backward=gather))
        return list(views)

    def slice(self, whole: Tensor, name: str, dims: str) -> Tensor:
        """A view of a part of `whole`; backward puts its gradient into zeros of the size of `whole`."""
        return self.split(whole, [(name, dims)])[0]

    def _view(self, whole: Tensor, name: str, dims: str) -> Tensor:
        view = self.tensor(name, dims, whole.dtype, grad=whole.grad, base=whole)
        view.sources = whole.sources
        return view

    def _record(self, op: Op) -> None:
        if not op.outputs[0].grad:
            op.saved = op.kept_by_ctx = ()
        self.ops.append(op)

    def _recomputed(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """What is kept in the place of `saved`: in a compiled model what they are computed from, if smaller.

        The partitioner looks for the smallest cut of the graph, but never computes again what a product
        reads or writes (torch/_functorch/partitioners.py, min_cut_rematerialization_partition).
        """
        kept: list[Tensor] = []
        for t in saved:
            largest = max((source.size_bytes for source in t.sources), default=0)
            kept += t.sources if 0 < largest <= t.size_bytes else (t,)
        return kept

    def _kept(self, saved: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple({id(t.storage): t for t in saved if t.size_bytes}.values())


def saved_storages(ops: Sequence[Op]) -> list[Tensor]:
    """The distinct memory that backward of `ops` needs, in the order it was made."""
    return list({id(t.storage): t.storage for op in ops for t in op.saved}.values())


def promoted(a: str, b: str) -> str:
    """The dtype of a result of two: the wider; of fp16 and bf16, neither of which holds the other, fp32."""
    if a != b and SIZES[a] == SIZES[b]:
        return "fp32"
    return a if SIZES[a] >= SIZES[b] else b


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Sum of the tensors' bytes."""
    return sum(t.size_bytes for t in tensors)
