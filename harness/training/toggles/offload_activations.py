"""The toggle `offload: [activations]`: what autograd saves in forward waits in host memory for backward.

Host memory is plain CPU memory, pinned if the device is a GPU. With a CPU as the device, or shape-only
tensors, there is no second memory: `on_host()` says which tensors belong to the host, and
observe/storage_tracker.py counts those apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness.recipe import Recipe
from harness.training.host_memory import SideStream, is_dense, to_host

MIN_OFFLOAD_BYTES = 4096
"""Smaller saved tensors stay on the device: a transfer would cost more than it frees."""
IN_FLIGHT = 2
"""The most saved tensors that are being copied to the host, and that are fetched ahead in backward."""


def without_repeats(tensor: Tensor) -> Tensor:
    """A view of `tensor` with each element once, if it was expanded, as a mask is for every head."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def saved_tensors(
    recipe: Recipe, model: nn.Module, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a forward pass that decides where autograd keeps what it saves."""
    return OffloadedActivations(model, device) if recipe.activations_on_host else nullcontext


class OffloadedActivations:
    """Saved-tensor hooks that keep in host memory what autograd saves in forward.

    In forward up to IN_FLIGHT tensors are held until their copy has left; in backward the next IN_FLIGHT
    tensors are fetched ahead.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        # weak references: an address alone can be that of another storage later (bitsandbytes casts biases)
        storages = [StorageWeakRef(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
        self._parameters = {reference.cdata: reference for reference in storages}
        self._side = SideStream(device)
        # weak references: only autograd's graph keeps host copies, so backward frees each as it passes it
        self._saved: list[weakref.ref[_Saved]] = []
        self._by_tensor: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._leaving: list[tuple[Tensor, Any]] = []
        self._fetched: dict[_Saved, tuple[Tensor, Any]] = {}

    def __call__(self) -> AbstractContextManager[Any]:
        """The context for one forward pass."""
        self._side.compute_waits_for_all()  # tensors that were fetched and never used may be freed only then
        self._saved, self._by_tensor, self._leaving, self._fetched = [], {}, [], {}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        seen = without_repeats(tensor)
        if storage._cdata in self._parameters or seen.nbytes < MIN_OFFLOAD_BYTES:
            return tensor
        # several nodes can save one tensor, as the input of q, k and v: one copy is enough for all
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._by_tensor.get((*key, tensor._version))
        saved = known[1]() if known is not None and not known[0].expired() else None
        if saved is None:
            saved = _Saved(len(self._saved), self._copy_out(seen), tensor.device, tensor.shape)
            self._saved.append(weakref.ref(saved))
            self._by_tensor[(*key, tensor._version)] = (StorageWeakRef(storage), self._saved[-1])
        return saved

    def _copy_out(self, tensor: Tensor) -> Tensor:
        if not is_dense(tensor):  # else copying would make a dense tensor, in the side stream's memory
            tensor = tensor.contiguous()
        with self._side.after_compute():
            host = to_host(tensor)
        self._leaving.append((tensor, self._side.event()))
        self._let_go(of_all_but=IN_FLIGHT)
        return host

    def _let_go(self, of_all_but: int) -> None:
        """Drop the tensors that were sent out first. The compute stream waits until each has been copied,
        before it may reuse the memory."""
        while len(self._leaving) > of_all_but:
            _, event = self._leaving.pop(0)
            self._side.compute_waits(event)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._let_go(of_all_but=0)
        self._fetch(saved)
        for reference in reversed(self._saved[max(saved.index - IN_FLIGHT, 0) : saved.index]):
            ahead = reference()
            if ahead is not None and not ahead.used:
                self._fetch(ahead)
        saved.used = True
        tensor, event = self._fetched.pop(saved)
        self._side.compute_waits(event)
        return tensor.expand(saved.shape)

    def _fetch(self, saved: _Saved) -> None:
        if saved in self._fetched:
            return
        tensor = torch.empty_like(saved.host, device=saved.device)
        with self._side.after_compute():
            tensor.copy_(saved.host, non_blocking=True)
        self._fetched[saved] = (tensor, self._side.event())


@dataclass(eq=False)
class _Saved:
    """What autograd keeps in place of a saved tensor."""

    index: int
    """How many tensors were saved before it in forward."""
    host: Tensor
    """The copy in host memory."""
    device: torch.device
    shape: torch.Size
    """The shape of the saved tensor; the copy has each element of an expanded one once."""
    used: bool = False
    """Whether backward has used it. It may use it once more, but it is not fetched ahead again."""
