"""Device memory through one steady optimizer step: every phase's largest moment, and the peak. No torch.

"Steady" is from the second step on: the optimizer's state exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from harness.hardware import Hardware
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.backward import in_backward
from harness.napkin.memory.forward import in_forward
from harness.napkin.memory.moment import Moment, moment_of
from harness.napkin.memory.sizes import Sizes
from harness.napkin.model.built_model import BuiltModel


def required_bytes(memory: Memory) -> int:
    """What must fit on the device: the peak and the CUDA context. Fragmentation comes on top."""
    return memory.peak.total_bytes + memory.sizes.hardware.calibration.cuda_context_bytes


@dataclass(frozen=True)
class Memory:
    """The sizes of a recipe's step, and the moments that can be its peak, in order."""

    sizes: Sizes

    @cached_property
    def moments(self) -> list[Moment]:
        sizes = self.sizes
        return [_after_setup(sizes), *in_forward(sizes), *in_backward(sizes), _step(sizes)]

    @property
    def peak(self) -> Moment:
        """The largest moment of the step; setup is not part of it."""
        return max(self.moments[1:], key=lambda moment: moment.total_bytes)


def memory_of(built: BuiltModel, hardware: Hardware) -> Memory:
    """The memory of a recipe on a device. Raises InputError for what cannot be built."""
    return Memory(Sizes(built, hardware))


def _after_setup(sizes: Sizes) -> Moment:
    copies = 0 if sizes.optimizer.on_host else sizes.optimizer.copy_bytes
    held = sizes.device_parameters()
    where, buckets = "model and optimizer built", sizes.bucket_bytes
    return Moment(phase="setup", where=where, parameters=held, optimizer_state=copies, gradients=buckets)


def _step(sizes: Sizes) -> Moment:
    optimizer, gradients = sizes.optimizer, sizes.gradient_bytes
    if optimizer.in_backward:
        return moment_of(sizes, "optimizer_step", "done in backward")
    if optimizer.on_host:
        held = 0 if sizes.recipe.parameters_on_host or sizes.parts_on_host else gradients
        return moment_of(sizes, "optimizer_step", "gradients leave for the host", gradients=held)
    if optimizer.gradient_dtype:
        elements = sum(w.count * w.gradient_elements for w in sizes.trained)
        gradients = elements * SIZES[optimizer.gradient_dtype]
    temporaries = optimizer.step_temporary_bytes
    return moment_of(sizes, "optimizer_step", "update", gradients=gradients, temporaries=temporaries)
