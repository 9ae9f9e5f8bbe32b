"""The GPU as its driver sees it: bytes of this process, and how busy the device was."""

# pynvml has no types.
# pyright: basic
import os
import time
from typing import Any

import pynvml


class Nvml:
    """One device, found by UUID: CUDA_VISIBLE_DEVICES renumbers devices for CUDA, not for NVML.

    Where NVML does not work (`unavailable` says why) every answer is None.
    """

    def __init__(self, uuid: str) -> None:
        self.unavailable: str | None = None
        self._handle: Any = None
        self._since_us = 0
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(
                uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            )
        except pynvml.NVMLError as error:
            self.unavailable = str(error)

    def process_bytes(self) -> int | None:
        """Device memory of this process; None where the driver does not tell."""
        if self._handle is None:
            return None
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError:  # not supported on this device, or not permitted
            return None
        ours = [process for process in processes if process.pid == os.getpid()]
        if not ours and len(processes) == 1:
            ours = processes  # in a container the pid is another one, and a process on the device there is
        return ours[0].usedGpuMemory if ours else None

    def used_bytes(self) -> int | None:
        """Device memory in use by everyone."""
        return None if self._handle is None else int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def driver(self) -> str | None:
        """Driver version."""
        return None if self._handle is None else str(pynvml.nvmlSystemGetDriverVersion())

    def start(self) -> None:
        """Begin the window that `utilization` looks at."""
        self._since_us = time.time_ns() // 1000

    def utilization(self) -> float | None:
        """Mean busy fraction since `start`, from the driver's own samples; None if it has none yet."""
        if self._handle is None:
            return None
        try:
            _, samples = pynvml.nvmlDeviceGetSamples(
                self._handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, self._since_us
            )
        except pynvml.NVMLError:  # no sample in the window, or not supported on this device
            return None
        values = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp > self._since_us]
        return sum(values) / len(values) / 100 if values else None


def device_names() -> list[str]:
    """Names of the GPUs that the driver sees, without waking one; empty where there is no driver."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(n))) for n in range(count)]
    except pynvml.NVMLError:  # no driver here, or one that NVML does not work with
        return []
