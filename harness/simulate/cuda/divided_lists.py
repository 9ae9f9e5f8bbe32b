"""Operators on lists of divided weights (DTensors), run on this rank's parts without DTensor's planning.

An optimizer steps all weights by a few operators on lists (torch._foreach_add_ and its like). For each of
them DTensor plans the weights one after the other, and goes through the whole list every time, which is half
of the time to simulate an FSDP2 rank of a 30B model with LoRA. Where all tensors at one place of the lists
are divided alike there is nothing to plan, since each rank computes its own part.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ACROSS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
"""Operators whose results need the parts of other ranks."""


def on_local_parts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """The positional and keyword arguments with local parts instead of DTensors, and a function that makes
    DTensors of the results. None unless it is an operator on lists of DTensors that are divided alike."""
    name = func._overloadpacket.__name__
    if not name.startswith("_foreach_") or name in _ACROSS or torch.is_grad_enabled():
        return None
    from torch.distributed.tensor import DTensor

    given = (*args, *kwargs.values())
    lists = [value for value in given if isinstance(value, list | tuple) and value]
    divided = [value for value in lists if isinstance(value[0], DTensor)]
    if not divided:
        return None
    whole = divided[0]
    if any(isinstance(value, Tensor) and not value.is_cpu for value in given):
        return None
    of_tensors = [value for value in lists if any(isinstance(item, Tensor) for item in value)]
    if not all(_divided_alike(value, whole) for value in of_tensors):
        return None

    def local(value: Any) -> Any:
        return [part.to_local() for part in value] if any(value is other for other in divided) else value

    def as_divided(results: Any) -> Any:
        if not isinstance(results, list | tuple):
            return results
        return [
            DTensor.from_local(
                result,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
            for result, like in zip(results, whole, strict=True)
        ]

    return [local(value) for value in args], {name: local(kwargs[name]) for name in kwargs}, as_divided


def _divided_alike(tensors: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Whether each is a DTensor divided as the one at its place in `whole`, without pending sums."""
    return len(tensors) == len(whole) and all(
        type(tensor) is type(other)
        and tensor.placements == other.placements
        and tensor.device_mesh == other.device_mesh
        and tensor.shape == other.shape
        and not any(placement.is_partial() for placement in tensor.placements)
        for tensor, other in zip(tensors, whole, strict=True)
    )
