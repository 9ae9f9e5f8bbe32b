"""Which device of this machine a recipe is measured on, and who watches it there."""

from __future__ import annotations

import torch

from harness.errors import InputError
from harness.measure.observer import DeviceObserver


def num_gpus() -> int:
    """GPUs of this machine that torch can use."""
    return torch.cuda.device_count()


def chosen_device(name: str | None = None) -> torch.device:
    """The device called `name` (cuda, cuda:1, cpu); for None the first GPU, else the CPU.

    Raises InputError for a device this machine does not have.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = ["cpu", *(["cuda"] if gpus else []), *gpus]
    if name not in here:
        raise InputError(f"--device {name}: this machine has {', '.join(here)}.")
    return torch.device(name)


def device_observer(device: torch.device, *, with_history: bool, compiled: bool) -> DeviceObserver:
    """What watches a run there; `with_history` records every allocation on a GPU. Of a `compiled` model the
    first step compiles, which nobody follows on a CPU."""
    if device.type == "cuda":
        from harness.measure.cuda import CudaObserver

        return CudaObserver(device, with_history=with_history)
    from harness.measure.cpu import CpuObserver

    return CpuObserver(follow_first_step=not compiled)
