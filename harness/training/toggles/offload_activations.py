"""What lives in host memory and visits the device when needed: activations, and the optimizer's copy.

Host memory is plain CPU memory (pinned when the device is a GPU). On a CPU or on shape-only tensors there is
no second memory, so `on_host()` says which tensors are meant to be on the host, and whoever counts bytes
(observe/storage_tracker.py) counts those apart. Parameters are in training/toggles/offload_parameters.py.
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
"""Saved tensors smaller than this stay: the transfer would cost more than it frees."""
IN_FLIGHT = 2
"""Saved tensors still being copied out, and saved tensors fetched ahead in backward."""


def without_repeats(tensor: Tensor) -> Tensor:
    """Of what was expanded (a mask, to every head) the part that is there once: a view of `tensor`."""
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
        # Not the addresses alone: of what dies (a bias that bitsandbytes casts) they are used again.
        stays = [StorageWeakRef(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
        self._parameters = {reference.cdata: reference for reference in stays}
        self._side = SideStream(device)
        # Only autograd's graph holds on to what was saved: each host copy is freed as backward passes it.
        self._saved: list[weakref.ref[_Saved]] = []
        self._by_tensor: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._leaving: list[tuple[Tensor, Any]] = []
        self._fetched: dict[_Saved, tuple[Tensor, Any]] = {}

    def __call__(self) -> AbstractContextManager[Any]:
        """The context for one forward pass."""
        self._side.compute_waits_for_all()  # before the memory of what was fetched and never used is reused
        self._saved, self._by_tensor, self._leaving, self._fetched = [], {}, [], {}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        seen = without_repeats(tensor)
        if storage._cdata in self._parameters or seen.nbytes < MIN_OFFLOAD_BYTES:
            return tensor
        # One tensor is saved by several nodes (the input of q, k and v): one copy serves them all.
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._by_tensor.get((*key, tensor._version))
        saved = known[1]() if known is not None and not known[0].expired() else None
        if saved is None:
            saved = _Saved(len(self._saved), self._copy_out(seen), tensor.device, tensor.shape)
            self._saved.append(weakref.ref(saved))
            self._by_tensor[(*key, tensor._version)] = (StorageWeakRef(storage), self._saved[-1])
        return saved

    def _copy_out(self, tensor: Tensor) -> Tensor:
        if not is_dense(tensor):  # or the copy would make this one itself, in the side stream's memory
            tensor = tensor.contiguous()
        with self._side.after_compute():
            host = to_host(tensor)
        self._leaving.append((tensor, self._side.event()))
        self._let_go(of_all_but=IN_FLIGHT)
        return host

    def _let_go(self, of_all_but: int) -> None:
        """Drop the tensors that were sent out first: only once they have left may their memory be reused."""
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
    """What autograd keeps of a saved tensor: its place in forward, its host copy, where it belongs."""

    index: int
    host: Tensor
    device: torch.device
    shape: torch.Size
    used: bool = False
    """Whether backward had it already: it may come once more, but is not worth fetching ahead."""
