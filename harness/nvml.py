"""The GPU as its driver sees it: bytes of this process, and how busy the device was."""

from __future__ import annotations

import os
import time
from typing import Any


class Nvml:
    """One device, found by UUID: CUDA_VISIBLE_DEVICES renumbers devices for CUDA, not for NVML."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._since_us = 0

    def process_bytes(self) -> int | None:
        """Device memory of this process; None where the driver does not tell (another PID namespace)."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid():
                return process.usedGpuMemory
        return None

    def used_bytes(self) -> int:
        """Device memory in use by everyone."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def driver(self) -> str:
        """Driver version."""
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def start(self) -> None:
        """Begin the window that `utilization` looks at."""
        self._since_us = time.time_ns() // 1000

    def utilization(self) -> float | None:
        """Mean busy fraction since `start`, from the driver's own samples; None if it has none yet."""
        try:
            _, samples = self._nvml.nvmlDeviceGetSamples(
                self._handle, self._nvml.NVML_GPU_UTILIZATION_SAMPLES, self._since_us
            )
        except self._nvml.NVMLError_NotFound:
            return None
        values = [sample.sampleValue.uiVal for sample in samples]
        return sum(values) / len(values) / 100 if values else None
