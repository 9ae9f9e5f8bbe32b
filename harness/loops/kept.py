"""The models and optimizers of a loop that is not ours: whose tensors are parameters and optimizer state.

Held weakly: what the program lets go is gone.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Kept:
    """An Owner (observe/labels.py) of everything that was seen so far, as if it were one model and one
    optimizer.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self.scaler: torch.amp.GradScaler | None = None

    def add_model(self, model: nn.Module) -> None:
        """Seen again it changes nothing."""
        if all(known is not model for known in self.models()):
            self._models.append(weakref.ref(model))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Seen again it changes nothing."""
        if all(known is not optimizer for known in self.optimizers()):
            self._optimizers.append(weakref.ref(optimizer))

    def models(self) -> Iterator[nn.Module]:
        """Those that are still there, in the order they were seen."""
        return (model for known in self._models if (model := known()) is not None)

    def optimizers(self) -> Iterator[Optimizer]:
        """Those that are still there, in the order they were seen."""
        return (optimizer for known in self._optimizers if (optimizer := known()) is not None)

    @property
    def model(self) -> nn.Module:
        """All models; of a loop that calls no module, what its optimizers step."""
        models = nn.ModuleList(self.models())
        if any(True for _ in models.parameters()):
            return models
        return nn.ParameterList(weight for group in self.param_groups for weight in group["params"])

    @property
    def optimizer(self) -> Any:
        """All optimizers: this object has their `param_groups` and `state`."""
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all optimizers."""
        return [group for optimizer in self.optimizers() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """Of all optimizers."""
        return {key: value for optimizer in self.optimizers() for key, value in optimizer.state.items()}

    def gradients(self) -> Iterator[Tensor]:
        """Those that are there now."""
        weights = (weight for group in self.param_groups for weight in group["params"])
        return (weight.grad for weight in weights if weight.grad is not None)


def trains(model: nn.Module) -> bool:
    """Whether a gradient is wanted of any of its weights."""
    return any(weight.requires_grad for weight in model.parameters())


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dicts (a batch), each where it is found."""
    waiting: list[Iterable[Any]] = [values]
    while waiting:
        for value in waiting.pop():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, list | tuple):
                waiting.append(value)
            elif isinstance(value, Mapping | UserDict):  # a BatchEncoding is a UserDict
                waiting.append(value.values())
