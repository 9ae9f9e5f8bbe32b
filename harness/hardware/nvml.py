"""What a GPU's driver says of it, by NVML: bytes of this process, and how busy the device was."""

# pynvml has no types.
# pyright: basic
import os
import time
from typing import Any

import pynvml


class Nvml:
    """One device in NVML. Where NVML does not work, `unavailable` says why, and every answer is None."""

    def __init__(self, uuid: str) -> None:
        """`uuid` instead of a number, since CUDA_VISIBLE_DEVICES renumbers devices for CUDA alone."""
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
        """Bytes of device memory that this process uses; None where the driver does not say."""
        if self._handle is None:
            return None
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError:  # not supported on this device, or not permitted
            return None
        ours = [process for process in processes if process.pid == os.getpid()]
        if not ours and len(processes) == 1:
            ours = processes  # in a container the process has another number for the driver
        return ours[0].usedGpuMemory if ours else None

    def used_bytes(self) -> int | None:
        """Bytes of device memory that all processes together use."""
        return None if self._handle is None else int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def driver(self) -> str | None:
        """The driver's version."""
        return None if self._handle is None else str(pynvml.nvmlSystemGetDriverVersion())

    def start(self) -> None:
        """Begin the interval that `utilization` is about."""
        self._since_us = time.time_ns() // 1000

    def utilization(self) -> float | None:
        """The mean fraction of the time since `start` in which the device was busy, by the driver's own
        samples; None if it has no sample yet."""
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
    """Names of this machine's GPUs, from the driver, without starting CUDA. Empty without a driver."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(n))) for n in range(count)]
    except pynvml.NVMLError:  # there is no driver, or NVML does not work with it
        return []
