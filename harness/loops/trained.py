"""The models that the backward passes of a step have trained: what tells an evaluation from a reference."""

import weakref
from collections.abc import Iterator

from torch import nn


class TrainedModels:
    """Those of this step, and before its first backward those of the one before. Held weakly."""

    def __init__(self) -> None:
        self._called: dict[int, weakref.ref[nn.Module]] = {}
        """Since the last backward, by id."""
        self._trained: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        """By id, and whether they were in training mode."""

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._trained)

    @property
    def any_called(self) -> bool:
        """Whether a model was called since the last backward."""
        return bool(self._called)

    def called(self, module: nn.Module) -> None:
        """A model that the next backward trains."""
        self._called[id(module)] = weakref.ref(module)

    def backward_ended(self, *, first: bool) -> None:
        """What was called since the last backward was trained. `first`: of its step."""
        if first:
            self._trained.clear()
        for number, known in self._called.items():
            model = known()
            if model is not None:
                self._trained[number] = known, model.training
        self._called.clear()

    def mode_of(self, module: nn.Module) -> bool | None:
        """Whether it was in training mode when it was trained; None if it was not trained."""
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
    """Whether one is the other, or wraps it (DistributedDataParallel, a compiled one)."""
    return (
        model is other
        or any(child is other for child in model.children())
        or (any(child is model for child in other.children()))
    )
