"""The models and optimizers of a loop that is not ours: whose tensors are parameters and optimizer state.

Held weakly: what the program lets go is gone.
"""

import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_Seen = TypeVar("_Seen")


class Kept:
    """An Owner (observe/labels.py) of everything that was seen so far, as if it were one model and one
    optimizer.
    """

    def __init__(self) -> None:
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        """By id, in the order they were seen."""
        self._trained: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()
        """A weight of each model that a gradient was wanted of, which is looked at first."""
        self.scaler: torch.amp.GradScaler | None = None

    def add_model(self, model: nn.Module) -> None:
        """Seen again it changes nothing."""
        _add(self._models, model)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Seen again it changes nothing."""
        _add(self._optimizers, optimizer)

    def models(self) -> Iterator[nn.Module]:
        """Those that are still there, in the order they were seen."""
        return (model for known in self._models.values() if (model := known()) is not None)

    def optimizers(self) -> Iterator[Optimizer]:
        """Those that are still there, in the order they were seen."""
        return (optimizer for known in self._optimizers.values() if (optimizer := known()) is not None)

    @property
    def model(self) -> nn.Module:
        """All models; of a loop that calls no module, what its optimizers step."""
        models = [*self.models()]
        together = models[0] if len(models) == 1 else nn.ModuleList(models)  # one keeps its modules' names
        if any(True for _ in together.parameters()):
            return together
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

    def trains(self, model: nn.Module) -> bool:
        """Whether a gradient is wanted of any of its weights."""
        known = self._trained.get(model)
        weight = known() if known is not None else None
        if weight is None or not weight.requires_grad:
            weight = next((weight for weight in model.parameters() if weight.requires_grad), None)
            if weight is not None:
                self._trained[model] = weakref.ref(weight)
        return weight is not None

    def gradients(self) -> Iterator[Tensor]:
        """Those that are there now."""
        weights = (weight for group in self.param_groups for weight in group["params"])
        return (weight.grad for weight in weights if weight.grad is not None)


def _add(seen: dict[int, weakref.ref[_Seen]], one: _Seen) -> None:
    known = seen.get(id(one))
    if known is None or known() is not one:  # another that is gone had this id
        seen.pop(id(one), None)
        seen[id(one)] = weakref.ref(one)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dicts (a batch), each where it is found."""
    waiting: list[Iterable[Any]] = [values]
    while waiting:
        for value in waiting.pop():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                waiting.append(value)
            elif isinstance(value, dict | Mapping | UserDict):  # a BatchEncoding is a UserDict
                waiting.append(value.values())
