"""The toggle `optimizer_in_backward`: each weight is stepped as soon as its gradient is there."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from harness.training.toggles.optimizer_state import Build, OfOthers, restore_state


class OptimizerInBackward(OfOthers):
    """Steps each weight in backward, as soon as its gradient is complete, and frees the gradient."""

    def __init__(self, weights: Sequence[Tensor], build: Build) -> None:
        self._each = {weight: build([weight]) for weight in weights}
        this = weakref.ref(self)

        def step_one(weight: Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._each[weight].step()
                optimizer._each[weight].zero_grad(set_to_none=True)

        # A hook that held its weight, here through the optimizer, would keep it for good: no garbage
        # collector sees what autograd holds.
        for weight in weights:
            weight.register_post_accumulate_grad_hook(step_one)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to do after backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The gradients are freed already."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One group a weight."""
        return [group for optimizer in self._each.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of every weight."""
        return {weight: optimizer.state[weight] for weight, optimizer in self._each.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer, in the order of the weights."""
        return {"each": [optimizer.state_dict() for optimizer in self._each.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, saved in zip(self._each.values(), state_dict["each"], strict=True):
            restore_state(optimizer, saved)
