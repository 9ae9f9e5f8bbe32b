"""Bytes of device memory that an operator's CUDA kernels read and write.

Each argument is read once and each result written once, an argument written in place both, as the
operator's schema says; the sets below name the operators that do less. What a kernel takes for itself is
written and read once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from harness.simulate.kernels.script import Step, Take

aten = torch.ops.aten

LAUNCH_NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
}
"""They take memory and leave it as it is (TensorFactories.cpp), or look at theirs in another way."""

_UNREAD: dict[Any, int] = {
    # they write their first argument
    aten.copy_: 0,
    aten.fill_: 0,
    aten.zero_: 0,
    aten.normal_: 0,
    aten.uniform_: 0,
    aten.bernoulli_: 0,
    aten._foreach_copy_: 0,
    aten._foreach_zero_: 0,
    # they ask it for its shape
    aten.zeros_like: 0,
    aten.ones_like: 0,
    aten.full_like: 0,
    aten.rand_like: 0,
    aten.new_zeros: 0,
    aten.new_ones: 0,
    aten.new_full: 0,
    aten.nll_loss_backward: 1,
    # the gradient squared: they are given it twice
    aten.addcmul_: 2,
    aten._foreach_addcmul_: 2,
}
"""The position of an argument that is not read."""

_LOOK_UP = {aten.embedding, aten.gather, aten.index, aten.index_select, aten.nll_loss_forward}
"""They read as much of their first argument as they return (of a loss: one number a row)."""

_SCATTER = {aten.index_put_, aten.index_add_, aten.index_copy_, aten.scatter_, aten.scatter_add_}
"""They touch their first argument only where the values go: as many bytes as those have."""


_GRADIENTS = ("g", "grads")
"""Arguments that bitsandbytes' and torch's fused optimizers declare as written; they read them, and write
them only to unscale them."""


def operator_bytes(func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step]) -> int:
    """Bytes one call moves. `out` is what it returned, `script` what its kernels take."""
    packet = func._overloadpacket
    taken = (step.size_bytes for step in script if isinstance(step, Take) and not step.workspace)
    moved = 2 * sum(taken)
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    for position, (argument, value) in enumerate(given):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name in _GRADIENTS and kwargs.get("grad_scale") is None:
            written = False
        size_bytes = tensor_bytes(value)
        if position == 0 and packet in _SCATTER:
            size_bytes = max(tensor_bytes(other) for other in args[1:])
        looked_up = position == 0 and packet in _LOOK_UP
        read = _UNREAD.get(packet) != position and not looked_up and not argument.is_out
        moved += size_bytes * (read + written)
    results = out if isinstance(out, list | tuple) else (out,)
    fresh = [r for r, declared in zip(results, _declared(func, results), strict=False) if not declared]
    moved += tensor_bytes(fresh)
    if packet in _LOOK_UP:
        moved += tensor_bytes(fresh)
    return moved


def _declared(func: Any, results: Sequence[Any]) -> list[bool]:
    """For each result, whether it is an argument (written in place)."""
    returns = func._schema.returns
    if len(returns) == 1 and len(results) > 1:  # one list
        returns = returns * len(results)
    return [r.alias_info is not None and r.alias_info.is_write for r in returns]


def tensor_bytes(values: Any) -> int:
    """Bytes of the tensors in `values`. An expanded tensor is read once."""
    if isinstance(values, Tensor):
        elements = values.numel()
        if 0 in values.stride():
            elements = prod(
                size for size, stride in zip(values.shape, values.stride(), strict=True) if stride
            )
        return elements * values.element_size()
    if isinstance(values, list | tuple):
        return sum(tensor_bytes(value) for value in values)
    return 0
