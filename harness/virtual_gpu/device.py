"""What a virtual GPU says of itself: a device of the hardware table, as environment variables for c/."""

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager

from harness.hardware import find_hardware
from harness.kernel_time import where_from

VARIABLE = "VIRTUAL_GPU"
"""Set in every process on a virtual GPU: the device's name in the hardware table."""

SHARED_KIB = {"7.0": 96, "7.5": 64, "8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""Shared memory that a block can have (CUDA programming guide, technical specifications)."""
FP32_CORES = {"7.0": 64, "7.5": 64, "8.0": 64}
"""Of a multiprocessor, each for a multiplication and an addition in a cycle; 128 of others (CUDA programming
guide, throughput of native arithmetic instructions)."""
COMPILED_FOR = (75, 80, 86, 90, 100, 120)
"""What PyTorch's CUDA 13 builds have code for. A device runs the newest that is not newer than itself."""


def emulated_device() -> str | None:
    """The device of the hardware table that this process has virtually; None for a process without."""
    return os.environ.get(VARIABLE)


def has_clock() -> bool:
    """Whether this process' virtual device has one: what it is given takes estimated time, which events
    show."""
    if emulated_device() is None:
        return False
    function = getattr(ctypes.CDLL(None), "virtual_gpu_has_clock", None)
    return function is not None and bool(function())


def start_clock() -> None:
    """Now, and not with the first optimizer's step; nothing on a real device, and where it runs already."""
    if emulated_device() is not None:
        ctypes.CDLL(None).virtual_gpu_is_timed()


@contextmanager
def clock_stopped() -> Generator[None]:
    """What is done within is no time of the program's."""
    if not has_clock():
        yield
        return
    library = ctypes.CDLL(None)
    library.virtual_gpu_stop_clock.restype = ctypes.c_int64
    stopped = ctypes.c_int64(library.virtual_gpu_stop_clock())
    try:
        yield
    finally:
        library.virtual_gpu_go_on(stopped)


def device_worked_us(index: int) -> int:
    """What the virtual device has taken for all that it was given since its clock began, if this machine's
    host were never late. Asked only where `has_clock`."""
    worked = ctypes.CDLL(None).virtual_gpu_device_worked
    worked.restype = ctypes.c_int64
    return worked(index) // 1000


def where_times_are_from(*, with_host: bool = True) -> str | None:
    """In words, for a profile of this process; None where there is no clock."""
    name = emulated_device()
    if name is None or not has_clock():
        return None
    host = "; the host's is this machine's own" if with_host else ", without what it waits for the host"
    return f"estimated, the device's ({where_from(find_hardware(name))}){host}"


def runs_alone() -> bool:
    """Whether this process is one rank of many whose others are answered for."""
    return os.environ.get("VIRTUAL_GPU_ALONE") == "1"


def device_variables(name: str, gpus: int) -> dict[str, str]:
    """The environment of `gpus` virtual GPUs of the kind `name`. Raises InputError for an unknown one."""
    hardware = find_hardware(name)
    name = hardware.name
    capability = hardware.datasheet.compute_capability
    number = int(capability.replace(".", ""))
    total = hardware.memory_bytes
    of_a_cycle = 2 * FP32_CORES.get(capability, 128) * hardware.sm_count
    return {
        VARIABLE: name,
        "VIRTUAL_GPU_NAME": hardware.datasheet.driver_name,
        "VIRTUAL_GPU_COUNT": str(gpus),
        "VIRTUAL_GPU_CAPABILITY": str(number),  # 90 for 9.0
        "VIRTUAL_GPU_BINARY": str(max(c for c in COMPILED_FOR if c <= max(number, COMPILED_FOR[0]))),
        "VIRTUAL_GPU_PROCESSORS": str(hardware.sm_count),
        "VIRTUAL_GPU_KILOHERTZ": str(
            round(hardware.peak_flops("fp32") / of_a_cycle / 1e3)
        ),  # the boost clock
        "VIRTUAL_GPU_SHARED": str(SHARED_KIB[capability] << 10),  # bytes that a block can have
        "VIRTUAL_GPU_TOTAL": str(total),  # bytes that it says it has
        "VIRTUAL_GPU_CAPACITY": str(total - hardware.calibration.cuda_context_bytes),  # bytes for the program
    }
