"""The toggle `optimizer_in_backward`: each weight is stepped as soon as its gradient is complete."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.training.toggles.optimizer_state import Build, Together


class OptimizerInBackward(Together):
    """Steps each weight in backward, as soon as its gradient is complete, and frees the gradient."""

    def __init__(self, weights: Sequence[Tensor], build: Build) -> None:
        super().__init__([build([weight]) for weight in weights])
        # a weak reference: a hook that refers to its weight, here through the optimizer, would keep it alive,
        # since the garbage collector does not see autograd's references
        for weight, optimizer in zip(weights, self._each, strict=True):
            weight.register_post_accumulate_grad_hook(partial(_step_one, weakref.ref(optimizer)))

    def step(self, closure: Any = None) -> None:
        """Has nothing left to do after backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Has nothing to free: backward has freed the gradients."""


def _step_one(optimizer: weakref.ref[torch.optim.Optimizer], weight: Tensor) -> None:
    alive = optimizer()
    if alive is not None:
        alive.step()
        alive.zero_grad(set_to_none=True)
