"""Which tensors are alive together: against autograd itself, over random graphs of elementwise operators."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from harness.napkin.memory.in_flight import InFlight
from harness.napkin.memory.liveness import Backward, forward_peak
from harness.napkin.tape.tape import Op, Tensor
from harness.observe.storage_tracker import StorageTracker
from harness.training.toggles.offload_activations import OffloadedActivations

ELEMENTS = 2048
SIZE = 4 * ELEMENTS
GRAPHS = 40


class Node(NamedTuple):
    """One operator: what it does, and the nodes that it reads."""

    kind: str
    reads: tuple[int, ...]


def graph(seed: int) -> list[Node]:
    """Each node's result is read by a later one, but for the last's."""
    draw = random.Random(seed)
    nodes = [Node("exp of a scalar", ())]
    unread = {0}
    while len(nodes) < 8 or len(unread) > 1:
        kind = draw.choice(["exp", "mul", "add"]) if len(unread) < 3 else draw.choice(["mul", "add"])
        first = draw.choice(sorted(unread))
        others = sorted((unread if len(nodes) >= 8 else set(range(len(nodes)))) - {first})
        if kind != "exp" and not others:
            continue
        reads = (first,) if kind == "exp" else (first, draw.choice(others))
        unread -= set(reads)
        unread.add(len(nodes))
        nodes.append(Node(kind, reads))
    return nodes


def tape(nodes: list[Node]) -> list[Op]:
    """derivatives.yaml: exp keeps its result, mul its second factor and its first, add nothing; add passes
    its gradient on."""
    results: list[Tensor] = []
    ops = []
    for kind, reads in nodes:
        inputs, out = tuple(results[read] for read in reads), Tensor("", "", "fp32", SIZE, True)
        saved = {"mul": inputs[::-1], "add": ()}.get(kind, (out,))
        ops.append(Op(name=kind, inputs=inputs, outputs=(out,), saved=saved, passes_gradient=kind == "add"))
        results.append(out)
    return ops


class End(torch.autograd.Function):
    """Sends a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.ones(ELEMENTS)


class Live:
    """Bytes on the device, of tensors as large as a node's; smaller ones are scalars."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def born(self, key: int, size_bytes: int, on_host: bool, op: str, frames: Any) -> None:
        self.now += 0 if on_host or size_bytes < SIZE else size_bytes
        self.most = max(self.most, self.now)

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        self.now -= 0 if on_host or size_bytes < SIZE else size_bytes

    def take_most(self) -> int:
        most, self.most = self.most, self.now
        return most


def run(
    nodes: list[Node], forward: AbstractContextManager[Any] | None = None, backward: bool = True
) -> tuple[int, int]:
    """The most bytes alive in forward and in backward. Python lets go of a result after its last read."""
    last_read = {read: index for index, node in enumerate(nodes) for read in node.reads}
    scalar, live = torch.zeros(1, requires_grad=True), Live()
    with StorageTracker(live):
        results: list[Any] = []
        with forward or nullcontext():
            for index, (kind, reads) in enumerate(nodes):
                inputs = [results[read] for read in reads]
                operator = {"mul": torch.mul, "add": torch.add}.get(kind, torch.exp)
                results.append(operator(*inputs or [scalar.expand(ELEMENTS)]))
                del inputs
                for read in reads:
                    if last_read[read] == index:
                        results[read] = None
            end = End.apply(results[-1]) if backward else None
            del results
        in_forward = live.take_most()
        if end is not None:
            end.backward()
        return in_forward, live.take_most()


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_peaks_are_those_of_autograd(seed):
    nodes = graph(seed)
    forward, backward = run(nodes)
    assert forward_peak(tape(nodes)).size_bytes == forward
    assert Backward(tape(nodes)).run().size_bytes == backward


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_without_autograd_nothing_outlives_its_last_reader(seed):
    nodes = graph(seed)
    forward, _ = run(nodes, torch.no_grad(), backward=False)
    assert forward_peak(tape(nodes), keeps=False).size_bytes == forward


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_offloaded_activations_in_flight_are_those_of_the_hooks(seed):
    nodes = graph(seed)
    forward, backward = run(nodes, OffloadedActivations(nn.Linear(1, 1), torch.device("cpu"))())
    assert forward_peak(tape(nodes), in_flight=InFlight(2)).size_bytes == forward
    assert Backward(tape(nodes), in_flight=InFlight(2)).run().size_bytes == backward


def chain(*sizes: int) -> list[Op]:
    """Operators that read the result before, keep their own, and make it of these sizes."""
    ops: list[Op] = []
    for size in sizes:
        out, inputs = Tensor("", "", "fp32", size, True), ops[-1].outputs if ops else ()
        ops.append(Op(name="exp", inputs=inputs, outputs=(out,), saved=(out,)))
    return ops


def test_what_the_stages_before_have_saved_is_still_on_its_way_out():
    """The very last of them, of 100,000 bytes, leaves when two of this stage's own have been sent."""
    flight = InFlight(2, [100_000, 10_000])
    assert forward_peak(chain(5_000), in_flight=flight).size_bytes == 5_000 + 110_000
    assert forward_peak(chain(5_000, 50_000), in_flight=flight).size_bytes == 55_000 + 100_000
    assert forward_peak(chain(5_000, 6_000, 200_000), in_flight=flight).size_bytes == 211_000


def test_what_the_stages_before_have_saved_is_fetched_ahead():
    """The first operator's result is there when the second's backward runs, and one of the stage before."""
    flight = InFlight(2, [100_000, 10_000])
    # results of 5,000, and gradients of as much: of the second's, and of the first's that it makes
    assert Backward(chain(5_000, 5_000), in_flight=flight).run().size_bytes == 110_000 + 5_000 + 5_000
    assert Backward(chain(5_000, 300_000), in_flight=flight).run().size_bytes == 705_000 + 5_000


def test_what_is_too_small_to_offload_delays_nothing():
    flight = InFlight(2, [100_000, 10_000])
    assert forward_peak(chain(100, 5_000), in_flight=flight).size_bytes == 100 + 5_000 + 110_000


@pytest.mark.parametrize(("compiled", "gradients"), [(False, 110_000), (True, 100_000)])
def test_a_compiled_model_makes_no_gradient_of_what_it_fuses(compiled, gradients):
    read = Tensor("", "", "fp32", 7_000, True)
    between = Tensor("", "", "fp32", 10_000, True, sources=(read,))
    out = Tensor("", "", "fp32", 100_000, True)
    ops = [
        Op(name="first", inputs=(read,), outputs=(between,)),
        Op(name="second", inputs=(between,), outputs=(out,)),
    ]
    assert Backward(ops, compiled=compiled).run().size_bytes == gradients
