"""Restores an optimizer's state from a checkpoint and checks it; has the optimizers made of others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Build = Callable[[Sequence[Tensor] | Sequence[dict[str, Any]]], torch.optim.Optimizer]
"""A function that makes an optimizer over weights, or over groups of weights with settings of their own."""


class OfOthers(torch.optim.Optimizer):
    """An optimizer that consists of others. Its load_state_dict restores each of them with
    `restore_state`."""


class Together(OfOthers):
    """Several optimizers, each over weights of its own, stepped one after the other."""

    def __init__(self, each: Sequence[torch.optim.Optimizer]) -> None:
        self._each = list(each)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer."""
        for optimizer in self._each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free every gradient."""
        for optimizer in self._each:
            optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers."""
        return [group for optimizer in self._each for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of every weight."""
        return {weight: state for optimizer in self._each for weight, state in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer."""
        return {"each": [optimizer.state_dict() for optimizer in self._each]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, saved in zip(self._each, state_dict["each"], strict=True):
            restore_state(optimizer, saved)


def restore_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give `optimizer` the state that `state_dict` of an equal one returned, in the same kind of memory.

    Raises ValueError or KeyError if the saved optimizer was of another kind, or of other parameters.
    """
    if isinstance(optimizer, OfOthers):
        optimizer.load_state_dict(saved)
        return
    make = getattr(optimizer, "init_state", None)
    if make is None:
        _restore_of_torch(optimizer, saved)
        return
    # bitsandbytes' load_state_dict would leave paged state on the GPU, and copy its code table to each weight
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            state = _flat(saved["state"].get(index, {}))
            index += 1
            if not state:  # the weight was never stepped
                continue
            make(group, parameter, number, place)
            own = optimizer.state[parameter]
            counts = [value for value in state.values() if isinstance(value, int)]
            if state_shapes(own) != state_shapes(state) or not all(0 <= count < 2**31 for count in counts):
                raise ValueError("the saved optimizer keeps other state")
            for name, value in state.items():
                if isinstance(value, Tensor):
                    own[name].copy_(value)
                else:
                    own[name] = value
    if index != sum(len(group["params"]) for group in saved["param_groups"]):
        raise ValueError("the saved optimizer has another number of parameters")


def _restore_of_torch(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer of torch's kind. Its load_state_dict accepts anything, and the next step would
    fail, so settings, counts and shapes are compared here."""
    settings = [_settings(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    if settings != [_settings(group) for group in optimizer.param_groups]:
        raise ValueError("the saved optimizer has other settings")
    for group in optimizer.param_groups:
        counts = [group[name] for name in COUNTED if name in group]
        if not all(isinstance(count, int | float) and -1 <= count < 2**31 for count in counts):
            raise ValueError("the saved optimizer counts what cannot be")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and state_shapes(state) != _shapes_after_a_step(optimizer, group, parameter):
                raise ValueError("the saved optimizer keeps other state")
            if state and not 1 <= float(state.get("step", 1)) < 2**31:
                raise ValueError("the saved optimizer has made an impossible number of steps")


COUNTED = ("k", "weight_sum", "lr_max", "scheduled_lr")
"""Entries of a group that schedulefree changes as it steps."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The entries of a group that stay the same while the optimizer steps."""
    return {name: value for name, value in group.items() if name not in ("params", *COUNTED)}


def _shapes_after_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, Any]:
    """The shapes of the state that `optimizer` keeps of `parameter`, found by a step of a small weight, with
    at most 2 elements in each dimension."""
    small = [min(size, 2) for size in parameter.shape]
    twin = torch.zeros(small, dtype=parameter.dtype).requires_grad_()
    twin.grad = torch.zeros_like(twin)
    other = type(optimizer)([twin])  # type: ignore[call-arg]  (its settings follow)
    other.param_groups[0].update(_settings(group) | {"fused": False})
    other.step()
    shapes = state_shapes(other.state[twin])
    for name, shape in shapes.items():
        if isinstance(shape, torch.Size) and shape:
            sizes = zip(shape, small, parameter.shape, strict=True)
            shapes[name] = torch.Size([whole if size == part else size for size, part, whole in sizes])
    return shapes


def state_shapes(state: dict[str, Any]) -> dict[str, Any]:
    """For each entry of the state, the shape of a tensor, or the type of anything else."""
    return {n: value.shape if isinstance(value, Tensor) else type(value) for n, value in state.items()}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a weight as one dict: bitsandbytes' state_dict has quantized entries in an inner one."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat
