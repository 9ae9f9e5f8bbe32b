"""Answer two: the training step on shape-only tensors, into a model of the CUDA caching allocator."""

from harness.simulate.memory import SimulatedMemory
from harness.simulate.simulated_run import import_everything, simulate, simulate_for_devices
