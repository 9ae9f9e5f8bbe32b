"""Where there is no public hook, the one place that wraps: functions of torch and one of safetensors.

- torch.autograd.backward, which Tensor.backward calls too: no hook tells where backward begins without the
  loss at hand, and a module's backward hooks change the graph.
- torch.autograd.grad, for loops that set gradients by hand: not within a module's call, and not where its
  result is a part of the loss (create_graph).
- torch.amp.GradScaler.scale and .step: the loss before it is scaled, and a step that the scaler leaves out.
- the iterator of torch.utils.data.DataLoader, its __next__: taking a batch.
- a module that was compiled in place (model.compile()): its hooks would be compiled with it.
- torch.save and safetensors.torch.save_file (which save_pretrained calls): saving. Not where pickle calls
  torch.save for a tensor that goes to another process.

Each calls what it wraps with the same arguments and returns the same; all are put back when the watching
ends. Who bound safetensors' function to a name of its own before is given the wrapped one too.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

Around = AbstractContextManager[None]


class Told(Protocol):
    """Who is told (loops/finder.py), of calls with their own arguments."""

    @property
    def is_in_forward(self) -> bool: ...
    def backward_runs(self, tensors: Any, *_: Any, **__: Any) -> Around: ...
    def scaled(self, scaler: torch.amp.GradScaler, loss: Any) -> None: ...
    def scaler_steps(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Around: ...
    def takes_a_batch(self, *_: Any) -> Around: ...
    def saves(self) -> Around: ...
    def compiled_call(self, module: nn.Module, args: Any, kwargs: Any) -> Around: ...


def _within(context: Callable[..., Around]) -> Callable[..., Any]:
    """Makes of a function one that runs within `context`, which is given the same arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context(*args, **kwargs):
                return original(*args, **kwargs)

        return wrapped

    return make


class Wraps:
    """Everything that is wrapped, until `undo`."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._undo: list[tuple[Any, str, Any]] = []

        def scale(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(scaler: Any, outputs: Any) -> Any:
                scaled = original(scaler, outputs)
                told.scaled(scaler, outputs)
                return scaled

            return wrapped

        def grad(outputs: Any, *_: Any, **kwargs: Any) -> Around:
            within = told.is_in_forward or kwargs.get("create_graph")  # a part of the loss
            return nullcontext() if within else told.backward_runs(outputs)

        def saving(*_: Any, **__: Any) -> Around:
            # who calls it, past this function and the wrapper: a storage's __reduce__ is in torch/storage.py
            own = sys._getframe(2).f_code.co_name == "__reduce__"
            return nullcontext() if own else told.saves()

        self._wrap(torch.autograd, "backward", _within(told.backward_runs))
        self._wrap(torch.autograd, "grad", _within(grad))
        self._wrap(torch.amp.GradScaler, "scale", scale)
        self._wrap(torch.amp.GradScaler, "step", _within(told.scaler_steps))
        self._wrap(_BaseDataLoaderIter, "__next__", _within(told.takes_a_batch))
        self._wrap(torch, "save", _within(saving))
        if "safetensors.torch" in sys.modules:
            self._wrap(sys.modules["safetensors.torch"], "save_file", _within(saving))

    def modules_compiled_in_place(self) -> None:
        """Wrap the calls of those that there are now."""

        def calling(module: nn.Module, *args: Any, **kwargs: Any) -> Around:
            return self._told.compiled_call(module, args, kwargs)

        # not isinstance: it would ask every object of every library for its __class__
        for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._wrap(module, "_compiled_call_impl", _within(partial(calling, module)))

    def undo(self) -> None:
        """Put back what was there, wherever nobody has wrapped it since."""
        for place, name, (wrapped, original) in reversed(self._undo):
            if vars(place).get(name) is wrapped:
                setattr(place, name, original)
        self._undo.clear()

    def _wrap(self, place: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(place)[name]
        wrapped = wraps(original)(make(original))
        places = [(place, name)]
        if name == "save_file":
            places += [
                (module, bound)
                for module in list(sys.modules.values())
                for bound, value in list(getattr(module, "__dict__", {}).items())
                if value is original and module is not place
            ]
        for where, bound in places:
            setattr(where, bound, wrapped)
            self._undo.append((where, bound, (wrapped, original)))
