"""What the host takes for a step: for the operators that it calls, and for the Python around them."""

from collections.abc import Mapping
from typing import NamedTuple

from harness.hardware import Calibration, Hardware
from harness.kernel_time.parameters import document


class HostTimes(NamedTuple):
    """Seconds that the host takes for one of each."""

    launch: float
    """An operator that launches kernels, with its part of autograd, without the Python that calls it."""
    operator: float
    """An operator of which the device learns nothing: an allocation, or one on a tensor of the host that is
    not offloaded."""
    view: float
    """An operator that makes a view."""
    call: float
    """A call of a Python function, with what it does before it calls another."""
    product: float
    """What cuBLAS takes for a matrix product, on top of `launch`."""


def host_times(hardware: Hardware) -> HostTimes:
    """What the host of `hardware` takes: as fitted, and slower or faster in everything, as its calibration's
    `host_op_s` is than the mean that was measured with the parameters (benchmarks/time/host.py)."""
    fitted: Mapping[str, float] = document()["host"]
    us = {name: fitted[f"{name}_us"] for name in HostTimes._fields}
    us["launch"] += fitted["driver_us"]
    scale = hardware.calibration.host_op_s / fitted["mean_us"]
    return HostTimes(**{name: value * scale for name, value in us.items()})


def slow_host(hardware: Hardware) -> float:
    """How many times as long as `host_times` a slow host takes, by the machines around measured cards
    (benchmarks/time/slow_hosts.py); 1 where a calibration says how fast the host is."""
    if hardware.calibration.host_op_s != Calibration.model_fields["host_op_s"].default:
        return 1.0
    return document()["host"].get("slow", 1.0)
