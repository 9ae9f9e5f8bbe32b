"""The simulator's device for code that others wrote: their model and their step, on shape-only tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.allocator_settings import Settings
from harness.cuda_libraries import import_bitsandbytes_fast
from harness.cuda_rules import CudaRules, cuda_behaviour
from harness.hardware import Hardware
from harness.module_paths import ModulePaths
from harness.recipe import Recipe
from harness.simulated_device import SimulatedDevice
from harness.simulated_memory import SimulatedMemory
from harness.simulated_time import SimulatedTime


@contextmanager
def simulated(
    hardware: Hardware, capacity_bytes: int | None
) -> Iterator[tuple[SimulatedMemory, SimulatedDevice]]:
    """Memory that counts while its device is entered; CUDA's behaviour all the while."""
    import_bitsandbytes_fast()
    memory = SimulatedMemory(Settings(), capacity_bytes)
    rules = CudaRules(Recipe(model="none"), hardware)
    with cuda_behaviour(rules):
        yield memory, SimulatedDevice(memory, rules, SimulatedTime(hardware), ModulePaths())
