"""Shape-only tensors that say they are on a GPU, for library code that takes another branch there.

Most code does not ask a tensor where it is. Code that does is run inside `as_on_cuda`
(simulate/cuda/libraries.py).
"""

from collections.abc import Callable
from functools import wraps
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness.system import replaced

CUDA = torch.device("cuda")
_DEVICE_OF = Tensor.device.__get__  # type: ignore[attr-defined]


class DeviceIsCuda(TorchFunctionMode):
    """A mode in which a shape-only tensor's device is CUDA, and tensors made on CUDA are shape-only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_OF:
            device = func(*args)
            return CUDA if device.type == "meta" else device
        if func.__name__ == "_parse_to":  # bitsandbytes asks by it whether a weight goes to a GPU
            return func(*args, **(kwargs or {}))
        named = {name: _shape_only(value) for name, value in (kwargs or {}).items()}
        return func(*[_shape_only(value) for value in args], **named)


def _shape_only(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


def as_on_cuda(function: Callable[..., Any], capability: tuple[int, int]) -> Callable[..., Any]:
    """`function`, for which every shape-only tensor is on a GPU of compute capability `capability`."""

    @wraps(function)
    def disguised(*args: Any, **kwargs: Any) -> Any:
        cuda = resolve_name("torch.cuda")
        with (
            DeviceIsCuda(),
            replaced(cuda, "get_device_capability", lambda *_: capability),
            # torch.random.fork_rng, by which peft draws a method's first values: there are none to draw
            replaced(cuda, "get_rng_state", lambda *_: None),
            replaced(cuda, "set_rng_state", lambda *_: None),
        ):
            return function(*args, **kwargs)

    return disguised
