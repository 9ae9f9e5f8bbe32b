"""The clock of a simulated GPU: a host that launches operators and a device that works them off in order."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.flops import operator_flops
from harness.hardware import Hardware
from harness.roofline import Work, achievable_flops

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Cost(NamedTuple):
    """What one operator takes: FLOPs, bytes moved, and the seconds of each."""

    flops: int
    bytes_moved: int
    compute_s: float
    memory_s: float


NOTHING = Cost(0, 0, 0.0, 0.0)
"""Of what launches no kernel."""


class SimulatedTime:
    """Seconds on a roofline. An operator starts when it is launched and the device is free; it takes the
    larger of its FLOPs over the achievable FLOP/s and its bytes over the achievable bandwidth.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.phase = ""
        self.recomputing = False
        """Whether what is launched now repeats what forward has computed."""
        self.flops: dict[str, int] = defaultdict(int)
        self.bytes_moved: dict[str, int] = defaultdict(int)
        self.recomputed_flops = 0
        self._bandwidth = hardware.memory_bandwidth * hardware.calibration.memory_fraction
        self._host_s = self._device_s = 0.0
        self._waited = {"compute": 0.0, "memory": 0.0, "host": 0.0}

    def begin_step(self) -> None:
        """Forget the step before: counters are of one step."""
        self.flops.clear()
        self.bytes_moved.clear()
        self.recomputed_flops = 0
        self._waited = dict.fromkeys(self._waited, 0.0)

    def now(self) -> float:
        """When an event recorded now would fire."""
        return max(self._host_s, self._device_s)

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """One operator was launched."""
        self.launch(self.cost(func, args, kwargs, out))

    def cost(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Cost:
        """What one operator takes. It follows from the shapes and dtypes of its arguments."""
        if func.is_view or not _is_on_device(out, args):
            return NOTHING
        flops = operator_flops(func, args, kwargs, out)
        moved = _bytes(args) + _bytes(out)
        compute_s = flops / self._rate(func, args) if flops else 0.0
        return Cost(flops, moved, compute_s, moved / self._bandwidth)

    def launch(self, cost: Cost) -> None:
        """One operator that takes `cost` was launched."""
        if cost is NOTHING:
            return
        flops, moved, compute_s, memory_s = cost
        self._host_s += self.hardware.calibration.host_op_s
        busy_s = max(compute_s, memory_s)
        idle_s = max(0.0, self._host_s - self._device_s)
        self._device_s = max(self._device_s, self._host_s) + busy_s
        self._waited["host"] += idle_s
        self._waited["compute" if compute_s > memory_s else "memory"] += busy_s
        self.bytes_moved[self.phase] += moved
        if flops:
            self.flops[self.phase] += flops
            if self.recomputing:
                self.recomputed_flops += flops

    def bound(self) -> Literal["compute", "memory", "host"]:
        """Where most of the step's time went."""
        return max(self._waited, key=lambda cause: self._waited[cause])  # type: ignore[return-value]

    def _rate(self, func: Any, args: Any) -> float:
        attention = "attention" in func._overloadpacket.__name__
        # of other dtypes (int8) the table has no rate: that of 16 bit, and fp16 is what every device has
        dtype = _DTYPES.get(next(a.dtype for a in args if isinstance(a, Tensor)), "fp16")
        return achievable_flops(Work(kind="attention" if attention else "matmul", dtype=dtype), self.hardware)


def _is_on_device(out: Any, args: Any) -> bool:
    for value in (out, *args):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Tensor):
            return first.device.type == "meta"
    return False


def _bytes(values: Any) -> int:
    """Bytes of the tensors read or written. An expanded tensor is read once."""
    if isinstance(values, Tensor):
        elements = values.numel()
        if 0 in values.stride():
            elements = prod(
                size for size, stride in zip(values.shape, values.stride(), strict=True) if stride
            )
        return elements * values.element_size()
    if isinstance(values, list | tuple):
        return sum(_bytes(value) for value in values)
    return 0
