"""Shape-only tensors that say they are on a GPU: for library code that asks a tensor where it is.

Most code does not care. Where it does, and takes another way on a GPU, simulate/cuda/behaviour.py runs it in
here.
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
    """Inside, a shape-only tensor's device is CUDA, and what is to be made there is made shape-only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_OF:
            device = func(*args)
            return CUDA if device.type == "meta" else device
        named = {name: _shape_only(value) for name, value in (kwargs or {}).items()}
        return func(*[_shape_only(value) for value in args], **named)


def _shape_only(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


def as_on_cuda(function: Callable[..., Any], capability: tuple[int, int]) -> Callable[..., Any]:
    """`function` with every shape-only tensor on a GPU of compute capability `capability`, as it sees it."""

    @wraps(function)
    def disguised(*args: Any, **kwargs: Any) -> Any:
        cuda = resolve_name("torch.cuda")
        with DeviceIsCuda(), replaced(cuda, "get_device_capability", lambda *_: capability):
            return function(*args, **kwargs)

    return disguised
