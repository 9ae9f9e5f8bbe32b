"""The models that a step's backward passes train, which tell evaluations from calls of reference models."""

import weakref
from collections.abc import Iterator

from torch import nn


class TrainedModels:
    """The models trained in this step; until its first backward, in the step before. They are held weakly."""

    def __init__(self) -> None:
        self._called: dict[int, weakref.ref[nn.Module]] = {}
        """By id, the models that were called since the last backward."""
        self._trained: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        """By id, the trained models, and whether each was in training mode."""

    @property
    def any(self) -> bool:
        """Whether any model was trained."""
        return bool(self._trained)

    @property
    def any_called(self) -> bool:
        """Whether a model was called since the last backward."""
        return bool(self._called)

    def called(self, module: nn.Module) -> None:
        """Note a call of a model, which the next backward trains."""
        self._called[id(module)] = weakref.ref(module)

    def backward_ended(self, *, first: bool) -> None:
        """Note that the models called since the last backward are trained. `first`: the first of its step."""
        if first:
            self._trained.clear()
        for number, known in self._called.items():
            model = known()
            if model is not None:
                self._trained[number] = known, model.training
        self._called.clear()

    def mode_of(self, module: nn.Module) -> bool | None:
        """Whether `module` was in training mode when it was trained; None if it was not trained."""
        known = self._trained.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        return next((mode for model, mode in self._models() if _same(model, module)), None)

    def is_evaluating(self) -> bool:
        """Whether a model that was trained in training mode has left it."""
        return any(mode and not model.training for model, mode in self._models())

    def _models(self) -> Iterator[tuple[nn.Module, bool]]:
        return ((model, mode) for known, mode in self._trained.values() if (model := known()) is not None)


def _same(model: nn.Module, other: nn.Module) -> bool:
    """Whether one is the other, or wraps it (DistributedDataParallel, a compiled module)."""
    return (
        model is other
        or any(child is other for child in model.children())
        or (any(child is model for child in other.children()))
    )
