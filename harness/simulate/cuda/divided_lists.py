"""Operators on lists of divided weights (DTensor), on the parts that this rank has: DTensor plans nothing.

An optimizer steps all weights by a few operators on lists (torch._foreach_add_ and its like). Of each,
DTensor plans one weight after the other and goes through the whole list every time: half of the simulation of
an FSDP2 rank of a 30B model with LoRA. Where the weights of an entry are divided alike there is nothing to
plan, for each rank computes what it has.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ACROSS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
"""A result of these needs what the other ranks have."""


def on_local_parts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """The arguments with each DTensor's local part in its place, and what makes DTensors of the results; None
    for all that is not an operator on lists of DTensors which are divided alike, entry by entry."""
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
    if not all(_alike(value, whole) for value in of_tensors):
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


def _alike(tensors: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Whether each is a DTensor that is divided as the one of `whole`, and has no sums to wait for."""
    return len(tensors) == len(whole) and all(
        type(tensor) is type(other)
        and tensor.placements == other.placements
        and tensor.device_mesh == other.device_mesh
        and tensor.shape == other.shape
        and not any(placement.is_partial() for placement in tensor.placements)
        for tensor, other in zip(tensors, whole, strict=True)
    )
