"""What the host takes for a step: for the operators that it calls, and for the Python around them."""

from collections.abc import Mapping
from typing import NamedTuple

from harness.hardware import Hardware
from harness.kernel_time.parameters import document


class HostTimes(NamedTuple):
    """Seconds that the host takes for one of each."""

    launch: float
    """An operator that launches kernels, with its part of autograd, without the Python that calls it."""
    operator: float
    """An operator of which the device learns nothing: an allocation, or one on tensors of the host."""
    view: float
    """An operator that makes a view."""
    call: float
    """A call of a Python function, with what it does before it calls another."""


def host_times(hardware: Hardware) -> HostTimes:
    """What the host of `hardware` takes, by its calibration's `host_op_s`.

    Where that is more than the mean of the processor that the parameters were fitted on, launches take the
    rest: a driver takes its time for each of them, and that processor had none. Where it is less, the
    processor is faster in everything.
    """
    fitted: Mapping[str, float] = document()["host"]
    each = HostTimes(*(fitted[f"{name}_us"] * 1e-6 for name in HostTimes._fields))
    mean_s = fitted["mean_us"] * 1e-6
    host_op_s = hardware.calibration.host_op_s
    if host_op_s < mean_s:
        return HostTimes(*(seconds * host_op_s / mean_s for seconds in each))
    return each._replace(launch=each.launch + host_op_s - mean_s)
