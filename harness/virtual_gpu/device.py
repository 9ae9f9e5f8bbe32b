"""The properties of a virtual GPU, which are those of a device of the hardware table: as environment
variables for the libraries in c/. And what a process on a virtual GPU can ask it: its name and its clock.
"""

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from harness.hardware import find_hardware
from harness.kernel_time import where_from
from harness.step_profile import WITHOUT_HOST

VARIABLE = "VIRTUAL_GPU"
"""The environment variable of every process on a virtual GPU: the device's name in the hardware table."""

SHARED_KIB = {"7.0": 96, "7.5": 64, "8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""By compute capability: KiB of shared memory that a thread block can have (CUDA programming guide, technical
specifications)."""
FP32_CORES = {"7.0": 64, "7.5": 64, "8.0": 64}
"""By compute capability: the fp32 units of a multiprocessor, each of which does one multiplication and one
addition in a cycle. Other capabilities have 128 (CUDA programming guide, throughput of native arithmetic
instructions)."""
COMPILED_FOR = (75, 80, 86, 90, 100, 120)
"""The compute capabilities, times 10, that PyTorch's CUDA 13 builds have code for. A device runs the newest
code that is not newer than itself."""


def emulated_device() -> str | None:
    """The name, in the hardware table, of this process' virtual GPU; None for a process that has none."""
    return os.environ.get(VARIABLE)


def has_clock() -> bool:
    """Whether this process' virtual GPU has a clock, so that its work takes estimated time."""
    if emulated_device() is None:
        return False
    function = getattr(ctypes.CDLL(None), "virtual_gpu_has_clock", None)
    return function is not None and bool(function())


def start_clock() -> None:
    """Start the virtual GPU's clock now instead of at the first optimizer step. Has no effect on a real GPU,
    nor on a clock that runs already."""
    if emulated_device() is not None:
        ctypes.CDLL(None).virtual_gpu_is_timed()


def conclude_report() -> None:
    """What this process does from now on is no step of a program: its last report is of those before."""
    times = sys.modules.get("virtual_gpu_times")
    if times is not None and times.watching is not None:
        times.watching.conclude()


@contextmanager
def clock_stopped() -> Generator[None]:
    """The virtual GPU's clock stands in the `with` block: harness' own work is not the program's."""
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
    """Microseconds that virtual GPU `index` has taken for all its work since its clock began, if the host had
    never been late with a launch. To be called only where `has_clock` is true."""
    worked = ctypes.CDLL(None).virtual_gpu_device_worked
    worked.restype = ctypes.c_int64
    return worked(index) // 1000


def where_times_are_from(*, with_host: bool = True) -> str | None:
    """A sentence for this process' profile that says where its times come from; None where there is no clock.

    `with_host`: whether the times include what the device waits for this machine's host.
    """
    name = emulated_device()
    if name is None or not has_clock():
        return None
    host = "; the host's is this machine's own" if with_host else f", {WITHOUT_HOST}"
    return f"estimated, the device's ({where_from(find_hardware(name))}){host}"


def runs_alone() -> bool:
    """Whether this process is one rank that runs alone: harness answers in the place of the other ranks."""
    return os.environ.get("VIRTUAL_GPU_ALONE") == "1"


def device_variables(name: str, gpus: int) -> dict[str, str]:
    """The environment variables that describe `gpus` virtual GPUs of the kind `name` to the libraries in c/.

    Raises InputError for a name that the hardware table does not have.
    """
    hardware = find_hardware(name)
    name = hardware.name
    capability = hardware.datasheet.compute_capability
    number = int(capability.replace(".", ""))
    total = hardware.memory_bytes
    flops_per_cycle = 2 * FP32_CORES.get(capability, 128) * hardware.sm_count
    return {
        VARIABLE: name,
        "VIRTUAL_GPU_NAME": hardware.datasheet.driver_name,
        "VIRTUAL_GPU_COUNT": str(gpus),
        "VIRTUAL_GPU_CAPABILITY": str(number),  # 90 for 9.0
        "VIRTUAL_GPU_BINARY": str(max(c for c in COMPILED_FOR if c <= max(number, COMPILED_FOR[0]))),
        "VIRTUAL_GPU_PROCESSORS": str(hardware.sm_count),
        # the boost clock
        "VIRTUAL_GPU_KILOHERTZ": str(round(hardware.peak_flops("fp32") / flops_per_cycle / 1e3)),
        "VIRTUAL_GPU_SHARED": str(SHARED_KIB[capability] << 10),  # bytes that a thread block can have
        "VIRTUAL_GPU_TOTAL": str(total),  # bytes that the device says it has
        "VIRTUAL_GPU_CAPACITY": str(total - hardware.calibration.cuda_context_bytes),  # bytes for one program
    }
