"""What lives in host memory and visits the device when needed: activations, and the optimizer's copy.

Host memory is plain CPU memory (pinned when the device is a GPU). On a CPU or on shape-only tensors
there is no second memory, so `on_host()` says which tensors are meant to be on the host, and whoever
counts bytes (tracker.py) counts those apart. Parameters are in offload_parameters.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

MIN_OFFLOAD_BYTES = 4096
"""Saved tensors smaller than this stay: the transfer would cost more than it frees."""
IN_FLIGHT = 2
"""Saved tensors still being copied out, and saved tensors fetched ahead in backward."""

_depth = 0


@contextmanager
def on_host() -> Iterator[None]:
    """Tensors made inside belong to host memory, whatever device they are on."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_on_host() -> bool:
    """Whether the caller is inside `on_host()`."""
    return _depth > 0


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


class OffloadedActivations:
    """Saved-tensor hooks that keep in host memory what autograd saves in forward.

    On a GPU the copies run on a side stream: in forward up to IN_FLIGHT tensors are held until their
    copy has left; in backward the next IN_FLIGHT tensors are fetched ahead. Device tensors are always
    allocated on the compute stream, so their memory is reused in a fixed order.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._parameters |= {b.untyped_storage()._cdata for b in model.buffers()}
        self._side = torch.Stream(device) if device.type not in ("cpu", "meta") else None
        # Only autograd's graph holds on to what was saved: each host copy is freed as backward passes it.
        self._saved: list[weakref.ref[_Saved]] = []
        self._by_tensor: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._leaving: list[tuple[Tensor, Any]] = []
        self._fetched: dict[_Saved, tuple[Tensor, Any]] = {}

    def __call__(self) -> AbstractContextManager[Any]:
        """The context for one forward pass."""
        if self._side is not None:  # before the memory of what was fetched and never used is used again
            torch.accelerator.current_stream().wait_stream(self._side)
        self._saved, self._by_tensor, self._leaving, self._fetched = [], {}, [], {}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        if storage._cdata in self._parameters or tensor.nbytes < MIN_OFFLOAD_BYTES:
            return tensor
        # One tensor is saved by several nodes (the input of q, k and v): one copy serves them all.
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._by_tensor.get((*key, tensor._version))
        saved = known[1]() if known is not None and not known[0].expired() else None
        if saved is None:
            saved = _Saved(len(self._saved), self._copy_out(tensor), tensor.device)
            self._saved.append(weakref.ref(saved))
            self._by_tensor[(*key, tensor._version)] = (StorageWeakRef(storage), self._saved[-1])
        return saved

    def _copy_out(self, tensor: Tensor) -> Tensor:
        if self._side is None:
            return to_host(tensor)
        self._side.wait_stream(torch.accelerator.current_stream())
        with self._side:
            host = to_host(tensor)
        self._leaving.append((tensor, self._side.record_event()))
        self._let_go(of_all_but=IN_FLIGHT)
        return host

    def _let_go(self, of_all_but: int) -> None:
        """Drop the tensors that were sent out first: only once they have left may their memory be reused."""
        while len(self._leaving) > of_all_but:
            _, event = self._leaving.pop(0)
            torch.accelerator.current_stream().wait_event(event)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._side is None:
            return torch.empty_like(saved.host, device=saved.device).copy_(saved.host)
        self._let_go(of_all_but=0)
        self._fetch(saved, self._side)
        for reference in reversed(self._saved[max(saved.index - IN_FLIGHT, 0) : saved.index]):
            ahead = reference()
            if ahead is not None and not ahead.used:
                self._fetch(ahead, self._side)
        saved.used = True
        tensor, event = self._fetched.pop(saved)
        torch.accelerator.current_stream().wait_event(event)
        return tensor

    def _fetch(self, saved: _Saved, side: torch.Stream) -> None:
        if saved in self._fetched:
            return
        tensor = torch.empty_like(saved.host, device=saved.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            tensor.copy_(saved.host, non_blocking=True)
        self._fetched[saved] = (tensor, side.record_event())


@dataclass(eq=False)
class _Saved:
    """What autograd keeps of a saved tensor: its place in forward, its host copy, where it belongs."""

    index: int
    host: Tensor
    device: torch.device
    used: bool = False
    """Whether backward had it already: it may come once more, but is not worth fetching ahead."""
