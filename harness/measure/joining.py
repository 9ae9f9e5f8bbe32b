"""The observer of a program that runs already: of the device that it uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.errors import InputError
from harness.measure.observer import DeviceObserver


def joining_observer(weights: Iterable[Tensor], *, with_history: bool = True) -> DeviceObserver:
    """Of the device that `weights` are on; of the GPU where offloaded weights are used on one.

    Raises InputError for a device that is neither a GPU of NVIDIA's nor the CPU.
    """
    kinds = {(weight.device.type, weight.device.index) for weight in weights}
    gpus = sorted(index for kind, index in kinds if kind == "cuda" and index is not None)
    others = {kind for kind, _ in kinds} - {"cuda", "cpu", "meta"}
    if others and not gpus:
        raise InputError(f"the model is on {', '.join(sorted(others))}: only cuda and cpu are watched.")
    if gpus or _uses_a_gpu():
        from harness.measure.cuda import CudaObserver

        index = gpus[0] if gpus else torch.cuda.current_device()
        return CudaObserver(torch.device("cuda", index), with_history=with_history, joins=True)
    from harness.measure.cpu import CpuObserver

    return CpuObserver(follow_first_step=False)


def _uses_a_gpu() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0
