"""Tensors in host memory, and the stream that copies them to the device and back."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_inside = ContextVar("on_host", default=False)
"""Whether the thread is in `on_host`. Each thread has its own value: a GPU's backward runs in a thread of
autograd, where hooks enter `on_host` themselves."""


_beside = ContextVar("is_beside", default=False)
"""Whether the thread is in `SideStream.after_compute`."""


@contextmanager
def on_host() -> Iterator[None]:
    """Tensors that this thread makes in the `with` block are host memory, whatever device they are on."""
    before = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(before)


def is_on_host() -> bool:
    """Whether the caller is inside `on_host()`."""
    return _inside.get()


def is_beside() -> bool:
    """Whether copies that the caller makes run beside the compute stream."""
    return _beside.get()


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
    """Whether the tensor's elements lie side by side, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class SideStream:
    """A stream for copies between host and device, which run while the compute stream computes.

    Device memory always comes from the compute stream, so it is reused in a fixed order. On a CPU and for
    shape-only tensors there is no stream: every copy is done at once, in the order in which a GPU gets it,
    and `is_beside` tells a simulation's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type in ("cpu", "meta") else torch.Stream(device)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Copies in the `with` block are queued: they begin when the compute stream's work so far is done."""
        before = _beside.set(True)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        try:
            with self._stream or nullcontext():
                yield
        finally:
            _beside.reset(before)

    def event(self) -> Any:
        """An event for `compute_waits`: the copies queued so far are done."""
        return self._stream.record_event() if self._stream is not None else None

    def compute_waits(self, event: Any) -> None:
        """Have the compute stream wait for the copies that were queued when `event` was made."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def compute_waits_for_all(self) -> None:
        """Have the compute stream wait for every copy queued so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
