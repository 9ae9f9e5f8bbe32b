"""The device for code that others wrote: their model and their step, on shape-only tensors; in a process on a
virtual GPU, that one."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol
from unittest.mock import patch

import torch
from torch import distributed

from harness.allocator.allocator import AllocatorOutOfMemory
from harness.allocator.settings import Settings
from harness.hardware.hardware import Hardware
from harness.recipe.recipe import Recipe
from harness.simulate.clock import SimulatedTime
from harness.simulate.cuda.behaviour import CudaRules, cuda_behaviour
from harness.simulate.cuda.communication import Communication
from harness.simulate.cuda.libraries import import_bitsandbytes_fast
from harness.simulate.cuda.one_rank import one_rank
from harness.simulate.cuda.streams import Streams
from harness.simulate.device import SimulatedDevice
from harness.simulate.memory import SimulatedMemory
from harness.simulate.module_paths import ModulePaths
from harness.virtual_gpu import emulated_device

PLACE = torch.device("cuda" if emulated_device() else "meta")
AS_THEN = {"TORCH_DISABLE_NATIVE_JIT": "1"}
"""PyTorch's own switch. The measurements are older than its operators in Triton: their products of rotary
frequencies and positions called cuBLAS."""
OUT_OF_MEMORY = (AllocatorOutOfMemory, torch.OutOfMemoryError)


class Memory(Protocol):
    """What a step has allocated, and reserved, at most since the last reset, in bytes."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def peak_reserved_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...


class _OfPyTorch:
    """The allocator's own counters."""

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    @property
    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def counted(
    hardware: Hardware, capacity_bytes: int | None, settings: Settings | None = None, ranks: int = 1
) -> Iterator[tuple[Memory, AbstractContextManager[object]]]:
    """Memory that counts while its device is entered; of the simulation, CUDA's behaviour all the while.

    Of several `ranks`, this process is the first, alone. A virtual GPU has the `settings` of its environment.
    """
    if emulated_device():
        with _first_of(ranks) if ranks > 1 else nullcontext():
            yield _OfPyTorch(), nullcontext()
        return
    import_bitsandbytes_fast()
    memory = SimulatedMemory(settings or Settings(), capacity_bytes)
    time = SimulatedTime(hardware)
    with patch.dict(os.environ, AS_THEN):
        rules = CudaRules(Recipe(model="none"), hardware)
    communication = Communication(time)
    with cuda_behaviour(rules), ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(one_rank(0, ranks, Streams(memory, time), communication))
        yield memory, SimulatedDevice(memory, rules, time, ModulePaths(), communication)


@contextmanager
def _first_of(ranks: int) -> Iterator[None]:
    import torch.testing._internal.distributed.fake_pg

    torch.cuda.set_device(0)
    distributed.init_process_group("cpu:fake,cuda:nccl", rank=0, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()
