"""The simulator's device for code that others wrote: their model and their step, on shape-only tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.allocator.settings import Settings
from harness.hardware.hardware import Hardware
from harness.recipe.recipe import Recipe
from harness.simulate.clock import SimulatedTime
from harness.simulate.cuda.behaviour import CudaRules, cuda_behaviour
from harness.simulate.cuda.communication import Communication
from harness.simulate.cuda.libraries import import_bitsandbytes_fast
from harness.simulate.device import SimulatedDevice
from harness.simulate.memory import SimulatedMemory
from harness.simulate.module_paths import ModulePaths


@contextmanager
def simulated(
    hardware: Hardware, capacity_bytes: int | None
) -> Iterator[tuple[SimulatedMemory, SimulatedDevice]]:
    """Memory that counts while its device is entered; CUDA's behaviour all the while."""
    import_bitsandbytes_fast()
    memory = SimulatedMemory(Settings(), capacity_bytes)
    time = SimulatedTime(hardware)
    rules = CudaRules(Recipe(model="none"), hardware)
    with cuda_behaviour(rules):
        yield memory, SimulatedDevice(memory, rules, time, ModulePaths(), Communication(time))
