"""The one place that wraps functions of others, where no public hook exists: torch's, and one of safetensors.

- torch.autograd.backward, which Tensor.backward calls too: no hook tells where backward begins without the
  loss at hand, and a module's backward hooks change the graph.
- torch.autograd.grad, for loops that set gradients by hand: not within a module's call, and not where its
  result is a part of the loss (create_graph).
- torch.amp.GradScaler.scale and .step: the loss before it is scaled, and a step that the scaler skips.
- __next__ of the iterator of torch.utils.data.DataLoader: taking a batch.
- the call of a module that was compiled in place (model.compile()): its hooks would be compiled with it.
- torch.save and safetensors.torch.save_file (which save_pretrained calls): saving; except where pickle calls
  torch.save for a tensor that goes to another process.

Each wrapper calls the original with the same arguments and returns the same; all originals are put back when
the watching ends. Modules that imported safetensors' function under a name of their own get the wrapper too.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

Around = AbstractContextManager[None]


def _within(context: Callable[..., Around]) -> Callable[..., Any]:
    """A decorator: the function runs within `context`, which is given the same arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context(*args, **kwargs):
                return original(*args, **kwargs)

        return wrapped

    return make


class Wraps:
    """Wraps everything that the module's docstring lists, until `undo`."""

    def __init__(self, listener: Any) -> None:
        """`listener`: the finder (loops/finder.py), which hears of the wrapped calls with their arguments."""
        self._listener = listener
        self._undo: list[tuple[Any, str, Any]] = []
        """(where, name, (wrapper, original)) of each wrapped function."""

        def scale(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(scaler: Any, outputs: Any) -> Any:
                scaled = original(scaler, outputs)
                listener.scaled(scaler, outputs)
                return scaled

            return wrapped

        def grad(outputs: Any, *_: Any, **kwargs: Any) -> Around:
            within = listener.is_in_forward or kwargs.get("create_graph")  # a part of the loss
            return nullcontext() if within else listener.backward_runs(outputs)

        def saving(*_: Any, **__: Any) -> Around:
            # who calls it, past this function and the wrapper: a storage's __reduce__ is in torch/storage.py
            own = sys._getframe(2).f_code.co_name == "__reduce__"
            return nullcontext() if own else listener.saves()

        self._wrap(torch.autograd, "backward", _within(listener.backward_runs))
        self._wrap(torch.autograd, "grad", _within(grad))
        self._wrap(torch.amp.GradScaler, "scale", scale)
        self._wrap(torch.amp.GradScaler, "step", _within(listener.scaler_steps))
        self._wrap(_BaseDataLoaderIter, "__next__", _within(listener.takes_a_batch))
        self._wrap(torch, "save", _within(saving))
        if "safetensors.torch" in sys.modules:
            self._wrap(sys.modules["safetensors.torch"], "save_file", _within(saving))

    def modules_compiled_in_place(self) -> None:
        """Wrap the calls of all modules that exist now and were compiled in place."""

        def calling(module: nn.Module, *args: Any, **kwargs: Any) -> Around:
            return self._listener.compiled_call(module, args, kwargs)

        # not isinstance: it would ask every object of every library for its __class__
        for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._wrap(module, "_compiled_call_impl", _within(partial(calling, module)))

    def undo(self) -> None:
        """Put the originals back, except where someone else has replaced the wrapper since."""
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
