"""Tensors in host memory, and the stream that copies to and from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_inside = ContextVar("on_host", default=False)
"""A thread has its own. A GPU's backward runs in autograd's, where hooks enter `on_host` themselves."""


@contextmanager
def on_host() -> Iterator[None]:
    """Tensors that this thread makes inside belong to host memory, whatever device they are on."""
    before = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(before)


def is_on_host() -> bool:
    """Whether the caller is inside `on_host()`."""
    return _inside.get()


def host_empty_like(tensor: Tensor) -> Tensor:
    """An uninitialized host tensor of the same shape and dtype; call inside `on_host()`.

    Pinned CPU memory if `tensor` is on a GPU, else on the tensor's own device.
    """
    if tensor.device.type in ("cpu", "meta"):
        return torch.empty_like(tensor, requires_grad=False)
    return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)


def to_host(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in host memory. On a GPU the copy is queued: wait before reading it."""
    with on_host():
        return host_empty_like(tensor).copy_(tensor, non_blocking=True)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements, in any order of the dimensions, lie side by side."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class SideStream:
    """Copies over the host link, beside the compute stream. Device memory always comes from the compute
    stream, so it is reused in a fixed order. On a CPU and shape-only there is no stream: every copy is
    done at once, in the order in which a GPU is told of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type in ("cpu", "meta") else torch.Stream(device)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Inside, copies are queued: each begins when the compute stream has done what it has now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def event(self) -> Any:
        """What `compute_waits` waits for: the copies queued so far."""
        return self._stream.record_event() if self._stream is not None else None

    def compute_waits(self, event: Any) -> None:
        """The compute stream goes on after the copies that `event` stands for."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def compute_waits_for_all(self) -> None:
        """The compute stream goes on after every copy queued so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
