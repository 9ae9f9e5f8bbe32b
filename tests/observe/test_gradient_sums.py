"""Autograd adds gradients, and puts them into zeros, in place where nothing else uses the memory.

Under a dispatch mode it never does, so the tracker does it in its stead. Oracle: the same backward without a
mode, as torch.profiler saw it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.observe.storage_tracker import StorageTracker


class Doubled(torch.autograd.Function):
    """Adds in Python, inside backward: the engine has no part in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + grads[0]


def shared(x: Tensor, w: Tensor) -> Tensor:
    """The first gradient of h goes to x too, as the same tensor: nobody may add to it."""
    h = x + w
    return (h + h.sin()).sum() + x.cos().sum()


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "three uses": lambda x, w: ((h := x * 2) @ w + h @ w.t() + h.sin()).sum(),
    "both sides of a product": lambda x, w: ((h := x @ w) * h).sum(),
    "shared": shared,
    "transposed": lambda x, w: ((h := x @ w).t().sin() + h.t().cos()).sum(),
    "expanded first": lambda x, w: (h := x @ w).sum() + h.sin().sum(),
    "expanded only": lambda x, w: (h := x @ w).sum() + h.sum(),
    "views": lambda x, w: ((h := x @ w)[:2].sin() + h[2:].cos()).sum() + h.view(-1).exp().sum(),
    "rows": lambda x, w: (x @ w)[torch.tensor([0, 2, 2], device=x.device)].sin().sum(),
    "the largest": lambda x, w: (x @ w).topk(2).values.sin().sum(),
    "gathered": lambda x, w: (x @ w).gather(1, torch.zeros(4, 2, dtype=torch.int64, device=x.device)).sum(),
    "put": lambda x, w: (x @ w).index_put((torch.tensor([1], device=x.device),), w[:1]).sin().sum(),
    "own function": lambda x, w: (Doubled.apply(h := x @ w) + h.sin()).sum(),  # type: ignore[operator]
    "recomputed": lambda x, w: checkpoint(lambda y: y.sin() * y.cos() + y, x @ w, use_reentrant=False).sum(),  # type: ignore[union-attr]
}


OUT_OF_PLACE = ("add", "index_put", "scatter", "scatter_add")
OPERATORS = [
    f"aten::{name}" for name in (*OUT_OF_PLACE, "add_", "_index_put_impl_", "scatter_", "scatter_add_")
]


class Counting(StorageTracker):
    """Counts what is added, in place or not."""

    def __init__(self) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self.sums = Counter[str]()

    def born(self, *_: Any) -> None:
        """See tracker.Sink."""

    def died(self, *_: Any) -> None:
        """See tracker.Sink."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.sums[func._overloadpacket._qualified_op_name] += 1
        return super().run(func, args, kwargs)


def backward_of(case: Callable[[Tensor, Tensor], Tensor], device: str) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x, w = (torch.randn(4, 4, device=device, requires_grad=True) for _ in range(2))
    return case(x, w), [x, w]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_tracker_adds_as_the_engine_does_without_it(case: Callable[[Tensor, Tensor], Tensor]) -> None:
    loss, plain = backward_of(case, "cpu")
    with torch.profiler.profile() as profile:
        loss.backward()
    seen = Counter(event.name for event in profile.events() or ())
    wanted = {name: seen[name] for name in OPERATORS}
    wanted["aten::_index_put_impl_"] -= seen["aten::index_put"]  # which calls it for its own copy

    for device in ("cpu", "meta"):
        tracker = Counting()
        with tracker:
            loss, leaves = backward_of(case, device)
            tracker.sums.clear()
            loss.backward()
        assert {name: tracker.sums[name] for name in wanted} == wanted, device
        if device == "cpu":
            for ours, theirs in zip(leaves, plain, strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def test_the_cases_have_both_kinds() -> None:
    """The engine adds in place in some and makes a new tensor in others, or the test above shows nothing."""
    seen = Counter[str]()
    for case in CASES.values():
        loss, _ = backward_of(case, "cpu")
        with torch.profiler.profile() as profile:
            loss.backward()
        seen.update(event.name for event in profile.events() or ())
    assert seen["aten::add_"] > 3
    assert seen["aten::add"] > 3
