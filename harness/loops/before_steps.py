"""Describes the memory of a watched process that runs out of it before its first step."""

import gc
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from harness.system import complain
from harness.units import counted, in_gib

MOST_SIZES = 3
"""How many sizes of tensors are named: those that take the most in all."""


def tell_shortage() -> None:
    """Say on stderr what the device holds, while the error's traceback still holds what was being made."""
    complain(shortage_in_words(), 1)


def shortage_in_words() -> str:
    """One paragraph: what the current device holds, and how much of the largest model is on it."""
    device = torch.cuda.current_device()
    living = gc.get_objects()  # not isinstance: it would make proxies import what they stand for
    modules = [each for each in living if issubclass(type(each), nn.Module)]
    sizes = _on_the_device(each for each in living if issubclass(type(each), Tensor))
    counts = sorted(Counter(sizes.values()).items(), key=lambda each: -each[0] * each[1])
    named = [f"{count:,} of {in_gib(size)}" for size, count in counts[:MOST_SIZES]]
    there = f"; by their size {', '.join(named)}" if named else ""
    allocated, total = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[1]
    text = (
        f"memory ran out before the first step, with {in_gib(allocated)} allocated of the {in_gib(total)} of "
        f"{torch.cuda.get_device_name(device)}: {counted(len(sizes), 'tensor')}{there}."
    )
    inner = {id(child) for module in modules for child in module.children()}
    models = [module for module in modules if id(module) not in inner]
    weights = [({*module.parameters(), *module.buffers()}, module) for module in models]
    most, model = max(
        weights, key=lambda each: sum(one.nbytes for one in each[0]), default=(set[Tensor](), None)
    )
    whole, here = sum(one.nbytes for one in most), sum(_on_the_device(most).values())
    if model is not None and here < whole:
        more = ", more than the device has" if whole > total else ""
        text += (
            f" {type(model).__name__} has {in_gib(whole)} of weights{more}; {in_gib(here)} of them are there."
        )
    return text


def _on_the_device(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage on the current device, by its address."""
    device = torch.cuda.current_device()
    storages = [one.untyped_storage() for one in tensors if one.is_cuda and one.device.index == device]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
