"""The models and optimizers of a watched loop, whose tensors are its parameters and its optimizer state.

They are held weakly: what the program drops is gone.
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
    """All models and optimizers seen, as an Owner (observe/labels.py) of one model and one optimizer."""

    def __init__(self) -> None:
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        """Both by id, in the order in which they were seen."""
        self._trained: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()
        """Of each model a weight that required a gradient, which `trains` looks at first."""
        self.scaler: torch.amp.GradScaler | None = None

    def add_model(self, model: nn.Module) -> None:
        """Note a model; one that was seen before changes nothing."""
        _add(self._models, model)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer; one that was seen before changes nothing."""
        _add(self._optimizers, optimizer)

    def models(self) -> Iterator[nn.Module]:
        """The models that still exist, in the order in which they were seen."""
        return (model for known in self._models.values() if (model := known()) is not None)

    def optimizers(self) -> Iterator[Optimizer]:
        """The optimizers that still exist, in the order in which they were seen."""
        return (optimizer for known in self._optimizers.values() if (optimizer := known()) is not None)

    @property
    def model(self) -> nn.Module:
        """All models in one; for a loop that calls no module, the weights that its optimizers step."""
        models = [*self.models()]
        together = models[0] if len(models) == 1 else nn.ModuleList(models)  # a single one keeps its names
        if any(True for _ in together.parameters()):
            return together
        return nn.ParameterList(weight for group in self.param_groups for weight in group["params"])

    @property
    def optimizer(self) -> Any:
        """All optimizers in one: this object has their `param_groups` and `state`."""
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all optimizers."""
        return {key: value for optimizer in self.optimizers() for key, value in optimizer.state.items()}

    def trains(self, model: nn.Module) -> bool:
        """Whether any weight of `model` requires a gradient."""
        known = self._trained.get(model)
        weight = known() if known is not None else None
        if weight is None or not weight.requires_grad:
            weight = next((weight for weight in model.parameters() if weight.requires_grad), None)
            if weight is not None:
                self._trained[model] = weakref.ref(weight)
        return weight is not None

    def gradients(self) -> Iterator[Tensor]:
        """The gradients that exist now, of the weights that optimizers step."""
        weights = (weight for group in self.param_groups for weight in group["params"])
        return (weight.grad for weight in weights if weight.grad is not None)


def _add(seen: dict[int, weakref.ref[_Seen]], one: _Seen) -> None:
    known = seen.get(id(one))
    if known is None or known() is not one:  # another that is gone had this id
        seen.pop(id(one), None)
        seen[id(one)] = weakref.ref(one)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, such as a batch; one in two places comes twice."""
    waiting: list[Iterable[Any]] = [values]
    while waiting:
        for value in waiting.pop():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                waiting.append(value)
            elif isinstance(value, dict | Mapping | UserDict):  # a BatchEncoding is a UserDict
                waiting.append(value.values())
