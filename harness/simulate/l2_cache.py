"""How much of what an operator moves the second-level cache of a simulated GPU holds.

A benchmark repeats one kernel and finds its own tensors in the cache; a kernel of a training step finds what
the kernels just before it have touched. What was touched last stays longest. A written line goes to the
device's memory when it is evicted, by whichever kernel that is: where products evict it, it costs nothing,
since they wait for their FLOPs. The virtual GPU does the same (virtual_gpu/c/l2_cache.c).
"""

from collections.abc import Iterable
from math import exp
from typing import Any, NamedTuple

from torch import Tensor

from harness.kernel_time import CacheRoom
from harness.kernels import accesses, given_results, tensor_bytes

SMALLEST_BYTES = 32 * 1024
"""Smaller tensors are not followed: beside a launch their bytes take no time."""
SHARED_BYTES = 64 * 1024 * 1024
"""In a storage of at most this size all views are touched together: it is as large as the largest caches.
The place of a tensor is the address of its storage, and in a larger one that of its first element."""


class TouchedTensor(NamedTuple):
    """A tensor that every call of an operator on such shapes reads or writes as a whole."""

    path: tuple[Any, ...]
    """The indices that lead to it in (args, kwargs, what is returned)."""
    size_bytes: int
    is_read: bool
    is_written: bool


def touched_tensors(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> list[TouchedTensor]:
    """The tensors that one call touches, without small ones."""
    found: list[TouchedTensor] = []

    def add(value: Any, path: tuple[Any, ...], is_read: bool, is_written: bool) -> None:
        if isinstance(value, list | tuple):
            for place, item in enumerate(value):
                add(item, (*path, place), is_read, is_written)
        elif isinstance(value, Tensor) and (size_bytes := tensor_bytes(value)) >= SMALLEST_BYTES:
            found.append(TouchedTensor(path, size_bytes, is_read, is_written))

    for position, (name, is_read, is_written) in enumerate(accesses(func, args, kwargs)):
        if is_read or is_written:
            value, path = (kwargs[name], (1, name)) if name in kwargs else (args[position], (0, position))
            add(value, path, is_read, is_written)
    results = out if isinstance(out, list | tuple) else (out,)
    for place, (result, was_given) in enumerate(zip(results, given_results(func, results), strict=False)):
        if not was_given:
            add(result, (2, place) if results is out else (2,), False, True)
    return found


Again = tuple[float, TouchedTensor]
"""A tensor that an operator touches, after the bytes that were touched since it was last: those of this
operator included, and infinitely many where it never was."""


class L2Cache:
    """The cache of one device, or of several with as much room."""

    def __init__(self, room: CacheRoom) -> None:
        self._room_bytes, self._evicted = room
        self._filled_bytes = self._dirty_bytes = 0.0
        """What was brought into the cache of late, and what of it was written."""

    def held_share(self, touches: Iterable[Again]) -> float:
        """The share of the bytes of one operator that it does not wait for the device's memory for."""
        room, evicted = self._room_bytes, self._evicted
        moved = read = filled = dirty = 0.0
        for distance_bytes, (_, size_bytes, is_read, is_written) in touches:
            moved += size_bytes * (is_read + is_written)
            if distance_bytes > room:
                missed = size_bytes * min(1.0, (1 + evicted) * (1 - room / distance_bytes))
                filled += missed
                if is_read:
                    read += missed
                if is_written:
                    dirty += missed
        if not filled:
            return 1.0
        if not room:
            return 0.0
        stays = exp(-filled / room)
        self._filled_bytes = self._filled_bytes * stays + filled
        self._dirty_bytes = self._dirty_bytes * stays + dirty
        evicts = filled * self._dirty_bytes / self._filled_bytes
        return max(0.0, 1 - (read + evicts) / moved)
