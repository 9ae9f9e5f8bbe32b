"""Peaks inside a piece of forward and backward: which tensors of a tape are alive together.

The rules are autograd's (torch/csrc/autograd/engine.cpp, input_buffer.cpp): operators are visited in
reverse; one makes the gradients of its inputs while its output's gradient and what it kept are alive, then
lets go of both; a second gradient of the same tensor is added into the first in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.napkin.memory.in_flight import Fetched, InFlight, Leaving, hooked, storages_of
from harness.napkin.tape.tape import Op, Tensor, saved_storages


@dataclass(frozen=True)
class StagePeak:
    """The most memory that a stage has alive at once, by what it is, and the operator that ran then."""

    op: Op | None = None
    kept: int = 0
    """For backward."""
    gradients: int = 0
    """Of activations."""
    weight_gradients: int = 0
    temporaries: int = 0
    parameters: int = 0

    @property
    def size_bytes(self) -> int:
        return self.kept + self.gradients + self.weight_gradients + self.temporaries + self.parameters


def forward_peak(
    ops: Sequence[Op],
    elsewhere: Sequence[Tensor] = (),
    *,
    entering: Tensor | None = None,
    keeps: bool = True,
    in_flight: InFlight | None = None,
) -> StagePeak:
    """The peak while `ops` run: what is kept so far, results not read yet, and the operator's own.

    `elsewhere` are tensors that the caller counts, `entering` is one that is freed once it has been read.
    Without `keeps` nothing outlives its last reader, as in the first forward pass under gradient
    checkpointing, but what the ctx keeps; with `in_flight` only the last of what was saved.
    """
    apart = {id(t.storage) for t in elsewhere}
    last_read = {id(t.storage): i for i, op in enumerate(ops) for t in (*op.inputs, *op.holds)}
    alive = {id(entering): entering.size_bytes} if entering and id(entering) not in apart else {}
    kept: dict[int, int] = {}
    in_ctx: dict[int, int] = {}
    leaving = Leaving(in_flight) if keeps and in_flight else None
    peak = StagePeak()
    for i, op in enumerate(ops):
        if leaving:  # what it reads is sent before it runs, and what it makes after
            leaving.send([t for t in hooked(op) if t in storages_of(op.inputs)], apart)
            staying = leaving.last | in_ctx
            alive = {k: size for k, size in alive.items() if k in staying or last_read.get(k, -1) >= i}
        alive |= {id(t.storage): t.storage.size_bytes for t in op.outputs}
        saved = {id(t.storage): t.storage.size_bytes for t in op.saved if id(t.storage) not in apart}
        alive |= saved
        in_ctx |= {id(t.storage): t.storage.size_bytes for t in op.kept_by_ctx}
        if keeps:
            kept = leaving.last if leaving else kept | saved
        before = leaving.before_bytes if leaving else 0
        staying = kept | in_ctx
        now = sum(alive.values()) + op.forward_temporary_bytes + before
        if now > peak.size_bytes:
            of_kept = sum(staying.values()) + before
            peak = StagePeak(op, of_kept, temporaries=now - of_kept)
        if leaving:
            leaving.send(hooked(op), apart)
            staying = leaving.last | in_ctx
        alive = {key: size for key, size in alive.items() if key in staying or last_read.get(key, -1) > i}
    return peak


class _Gradient:
    """A gradient's memory, shared by the tensors that hold it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.holders = 0


@dataclass
class Backward:
    """What backward of `ops` needs: call `run` once."""

    ops: Sequence[Op]
    elsewhere: Sequence[Tensor] = ()
    """Tensors that the caller counts: what all blocks share, a checkpointed input."""
    accumulates: bool = False
    """Weight gradients exist already: a new one is added to the old and freed."""
    frees_weight_gradients: bool = False
    """Each weight is stepped as its gradient arrives."""
    step_temporary: int = 0
    """Bytes that stepping a weight needs, for each byte of its gradient (with frees_weight_gradients)."""
    in_flight: InFlight | None = None
    parameters: Callable[[Op], int] = lambda op: 0
    """The parameters that are on the device while an operator's backward runs."""
    compiled: bool = False
    """Fused kernels keep no gradient of what they pass through."""
    peak: StagePeak = field(default_factory=StagePeak)

    def run(self) -> StagePeak:
        """The peak, from the moment the last operator's output has its gradient."""
        self._gradients: dict[int, _Gradient] = {}
        self._live = 0
        self._weights = 0
        users = Counter(id(t.storage) for op in self.ops for t in op.saved)
        elsewhere = {id(t.storage) for t in self.elsewhere}
        kept = {id(t): t.size_bytes for t in saved_storages(self.ops) if id(t) not in elsewhere}
        in_ctx = {id(t.storage) for op in self.ops for t in op.kept_by_ctx}
        last = self.ops[-1].outputs[0]
        self._gradients[id(last)] = _Gradient(last.size_bytes)
        self._hold(self._gradients[id(last)])
        fetched = Fetched(self.in_flight, self.ops, elsewhere) if self.in_flight else None
        always = sum(size for key, size in kept.items() if key in in_ctx)
        for op in reversed(self.ops):
            given = [g for t in op.outputs if (g := self._gradients.pop(id(t), None))]
            before = always + fetched.while_running(op) if fetched else sum(kept.values())
            for t in op.saved:
                users[id(t.storage)] -= 1
                if not users[id(t.storage)] and id(t.storage) not in in_ctx:
                    kept.pop(id(t.storage), None)
            after = always + fetched.ahead_bytes if fetched else sum(kept.values())
            if given:
                self._visit(op, given, before, after)
        return self.peak

    def _visit(self, op: Op, given: list[_Gradient], kept: int, kept_after: int) -> None:
        inputs = [t for t in op.inputs if t.grad]
        if op.passes_gradient:
            made = [given[0] if t.size_bytes == given[0].size_bytes else self._new(t) for t in inputs]
        else:
            made = [self._new(t) for t in inputs]
        fresh = sum(g.size_bytes for g in made if g.holders == 0 and g not in given)
        weight = op.weight_gradient_bytes
        self._note(op, kept, self._live + fresh, self._weights + weight, op.backward_temporary_bytes)
        if not (self.accumulates or self.frees_weight_gradients):
            self._weights += weight
        for gradient in made:
            self._hold(gradient)
        for gradient in given:
            self._drop(gradient)
        added: list[_Gradient] = []
        for t, gradient in zip(inputs, made, strict=True):
            old = self._gradients.get(id(t))
            if old is None:
                self._gradients[id(t)] = gradient
                continue
            if old.holders > 1:  # others need it as it is: the sum is a new tensor
                total = self._gradients[id(t)] = _Gradient(old.size_bytes)
                self._hold(total)
                self._note(op, kept_after, self._live, self._weights, 0)
                self._drop(old)
            added.append(gradient)
        if self.frees_weight_gradients:
            stepping = weight * self.step_temporary
            self._note(op, kept_after, self._live, self._weights + weight, stepping)
        for gradient in added:  # the engine lets go of what an operator made when all of it is where it goes
            self._drop(gradient)

    def _new(self, t: Tensor) -> _Gradient:
        return _Gradient(0 if self.compiled and t.sources else t.size_bytes)

    def _hold(self, gradient: _Gradient) -> None:
        self._live += gradient.size_bytes if gradient.holders == 0 else 0
        gradient.holders += 1

    def _drop(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self._live -= gradient.size_bytes

    def _note(self, op: Op, kept: int, gradients: int, weights: int, temporary: int) -> None:
        now = StagePeak(op, kept, gradients, weights, temporary, self.parameters(op))
        if now.size_bytes > self.peak.size_bytes:
            self.peak = now
