"""Bytes of device memory that an operator's CUDA kernels read and write.

Each argument is read once and each result written once, an argument written in place both, as the
operator's schema says; those that do less say so (kernels/operators.py). What a kernel takes for
itself is written and read once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from harness.kernels.operators import operator_of
from harness.kernels.script import Step, Take

_GRADIENTS = ("g", "grads")
"""Arguments that bitsandbytes' and torch's fused optimizers declare as written; they read them, and write
them only to unscale them."""


def operator_bytes(func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step]) -> int:
    """Bytes one call moves. `out` is what it returned, `script` what its kernels take."""
    operator = operator_of(func)
    taken = (step.size_bytes for step in script if isinstance(step, Take) and not step.workspace)
    moved = 2 * sum(taken)
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    for position, (argument, value) in enumerate(given):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name in _GRADIENTS and kwargs.get("grad_scale") is None:
            written = False
        size_bytes = tensor_bytes(value)
        if position == 0 and operator.scatters:
            size_bytes = max(tensor_bytes(other) for other in args[1:])
        looked_up = position == 0 and operator.looks_up
        read = position != operator.unread and not looked_up and not argument.is_out
        moved += size_bytes * (read + written)
    results = out if isinstance(out, list | tuple) else (out,)
    fresh = [r for r, declared in zip(results, _declared(func, results), strict=False) if not declared]
    return moved + tensor_bytes(fresh) * (2 if operator.looks_up else 1)


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
