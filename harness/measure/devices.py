"""The device of this machine that a recipe is measured on, the observer for it, and the speed of a CPU."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from harness.errors import InputError
from harness.hardware import FP8_SINCE
from harness.measure.observer import DeviceObserver
from harness.recipe import Recipe
from harness.training import DTYPES

SIDE = 512
"""Rows and columns of the matrices: large enough for all cores, and multiplied in milliseconds on most."""
ENOUGH_S = 0.2
"""For how many seconds products are tried."""


def matmul_flops_per_s(dtype: str) -> float:
    """FLOP/s of square matrix products in `dtype` (fp32, bf16, fp16) on this CPU, tried for ENOUGH_S.

    The fastest one counts: what else runs on the machine makes products slower and never faster.
    """
    kind = DTYPES[dtype]
    square = torch.ones(SIDE, SIDE, dtype=kind)
    torch.mm(square, square)  # the first one chooses and compiles its kernel
    best_s, spent_s = float("inf"), 0.0
    while spent_s < ENOUGH_S:
        began = time.perf_counter()
        torch.mm(square, square)
        took_s = time.perf_counter() - began
        best_s, spent_s = min(best_s, took_s), spent_s + took_s
    return 2 * SIDE**3 / best_s


def joining_observer(weights: Iterable[Tensor]) -> DeviceObserver:
    """An observer that joins a program at work, for the device that its `weights` are on, or for the GPU that
    uses them if they are offloaded.

    Raises InputError for a device that is neither a GPU of NVIDIA's nor the CPU.
    """
    kinds = {(weight.device.type, weight.device.index) for weight in weights}
    gpus = sorted(index for kind, index in kinds if kind == "cuda" and index is not None)
    others = {kind for kind, _ in kinds} - {"cuda", "cpu", "meta"}
    if others and not gpus:
        raise InputError(f"the model is on {', '.join(sorted(others))}: only cuda and cpu are watched.")
    if gpus or (torch.cuda.is_initialized() and torch.cuda.memory_allocated()):
        from harness.measure.cuda import CudaObserver

        index = gpus[0] if gpus else torch.cuda.current_device()
        return CudaObserver(torch.device("cuda", index), with_history=True, joins=True)
    from harness.measure.cpu import CpuObserver

    return CpuObserver(follow_first_step=False)


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


def check_units(recipe: Recipe, device: torch.device) -> None:
    """Raise InputError for a GPU without the units that the recipe's products need: torch's own error comes
    when the model is there, and says nothing of the recipe."""
    if "fp8" not in recipe.dtypes_of_products or device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if float(f"{major}.{minor}") < FP8_SINCE:
        raise InputError(
            f"fp8: true: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, "
            f"and products in fp8 need {FP8_SINCE}; set fp8: false, or choose another device."
        )


def device_observer(device: torch.device, *, with_history: bool, compiled: bool) -> DeviceObserver:
    """The observer of a run on `device`. `with_history`: record every allocation on a GPU. `compiled`: the
    model is, and on a CPU the first step, which compiles, is not followed."""
    if device.type == "cuda":
        from harness.measure.cuda import CudaObserver

        return CudaObserver(device, with_history=with_history)
    from harness.measure.cpu import CpuObserver

    return CpuObserver(follow_first_step=not compiled)
