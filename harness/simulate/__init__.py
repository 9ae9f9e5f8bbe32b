"""The training step on shape-only tensors, whose memory a model of the CUDA caching allocator counts."""

from harness.simulate.memory import SimulatedMemory
from harness.simulate.simulated_run import import_everything, simulate, simulate_for_devices
