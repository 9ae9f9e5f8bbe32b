"""A fake of torch.cuda and NVML: an allocator that counts, writes the trace PyTorch writes, and has a
clock that moves when told. Only what measure_cuda.py and nvml.py ask for."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

UUID = "5bd3a0a4-0000-1111-2222-333344445555"
CACHED = 2 * 2**20
"""Reserved beyond what is allocated."""


class FakeCuda:
    """Addresses are handed out once, blocks are multiples of 512 bytes."""

    def __init__(self, name: str = "NVIDIA H200", total_bytes: int = 141 * 10**9) -> None:
        self.name, self.total_bytes = name, total_bytes
        self.blocks: dict[int, tuple[int, list[Any]]] = {}
        self.trace: list[dict[str, Any]] = []
        self.recording = False
        self.metadata = ""
        self.now_ms = 0.0
        self.now_us = 1_000_000
        self.allocated = self.peak = self.reserved_peak = 0
        self.calls: list[str] = []
        self.watchers: list[Any] = []
        self._next = 0x7F00_0000_0000

    def alloc(self, size: int) -> int:
        address, self._next = self._next, self._next + 2**24
        block = -(-size // 512) * 512
        frames = [{"filename": "model.py", "line": 1, "name": "forward"}] if self.recording else []
        self._write("alloc", address, size, frames)
        self.blocks[address] = (block, frames)
        self.allocated += block
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.allocated + CACHED)
        return address

    def free(self, address: int) -> None:
        size, _ = self.blocks.pop(address)
        self.allocated -= size
        self._write("free_requested", address, size)
        self._write("free_completed", address, size)

    def fail(self, size: int) -> None:
        self._write("oom", self.total_bytes - self.allocated, size)
        for watch in self.watchers:
            watch(0, size, self.allocated, self.total_bytes - self.allocated)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    def _write(self, action: str, address: int, size: int, frames: Any = ()) -> None:
        self.now_us += 1
        if self.recording:
            place = "device_free" if action == "oom" else "addr"
            entry = {"action": action, place: address, "size": size, "stream": 0, "time_us": self.now_us}
            self.trace.append({**entry, "user_metadata": self.metadata, "frames": list(frames)})

    # What PyTorch offers.
    def record_memory_history(self, enabled: str | None = "all", **options: Any) -> None:
        assert enabled is None or options == {"max_entries": 2_000_000, "stacks": "python", "context": "all"}
        self.calls.append(f"history {enabled}")
        self.recording = enabled is not None
        if not self.recording:  # as recordHistory() of CUDACachingAllocator.cpp does
            self.trace = []

    def set_memory_metadata(self, metadata: str) -> None:
        self.metadata = metadata

    def snapshot(self) -> dict[str, Any]:
        segments = [
            {
                "device": 0,
                "address": address,
                "total_size": size,
                "blocks": [{"size": size, "state": "active_allocated", "frames": frames}],
            }
            for address, (size, frames) in self.blocks.items()
        ]
        inactive = {"size": 512, "state": "inactive", "frames": []}
        elsewhere = {"device": 1, "address": 1, "total_size": 512, "blocks": [inactive]}
        return {"segments": [*segments, elsewhere], "device_traces": [list(self.trace), []]}

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.calls.append("reset")
        self.peak, self.reserved_peak = self.allocated, self.allocated + CACHED

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.allocated + CACHED,
            "reserved_bytes.all.peak": self.reserved_peak,
            "num_alloc_retries": 3,
        }

    def nested_stats(self, device: Any) -> dict[str, Any]:
        reserved = {"current": self.allocated + CACHED, "peak": self.reserved_peak}
        allocated = {"current": self.allocated, "peak": self.peak}
        return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}

    def synchronize(self, device: Any) -> None:
        self.calls.append("synchronize")

    def properties(self, device: Any) -> Any:
        return SimpleNamespace(name=self.name, total_memory=self.total_bytes, uuid=UUID)


class FakeNvml:
    """One device with one process on it, and its last utilization samples."""

    def __init__(self) -> None:
        self.processes = [SimpleNamespace(pid=-1, usedGpuMemory=700)]
        self.samples: list[tuple[int, int]] = []
        """(time in microseconds, percent)"""
        self.works = True

    def init(self) -> None:
        if not self.works:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def handle(self, uuid: str) -> str:
        assert uuid == f"GPU-{UUID}"
        return "handle"

    def get_samples(self, handle: str, kind: int, since_us: int) -> tuple[int, list[Any]]:
        assert kind == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        if not self.samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 1, [
            SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=v)) for t, v in self.samples
        ]


def install(patch: pytest.MonkeyPatch, cuda: FakeCuda, nvml: FakeNvml) -> None:
    """Put the fakes where the real functions are. Fails for a function that torch does not have."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = cuda.now_ms

        def elapsed_time(self, later: "Event") -> float:
            assert cuda.calls[-1] == "synchronize"
            return later.at_ms - self.at_ms

    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "get_device_properties", cuda.properties)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    patch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    patch.setattr(torch.cuda, "reset_peak_memory_stats", cuda.reset_peak_memory_stats)
    patch.setattr(torch.cuda, "memory_stats", cuda.memory_stats)
    patch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", cuda.nested_stats)
    patch.setattr(torch.cuda, "max_memory_allocated", lambda device: cuda.peak)
    patch.setattr(torch.cuda, "memory_reserved", lambda device: cuda.allocated + CACHED)
    patch.setattr(
        torch.cuda, "host_memory_stats", lambda: {"active_bytes.peak": 2**40, "allocated_bytes.peak": 4096}
    )
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (12345, cuda.total_bytes))
    attach = "_cuda_attach_out_of_memory_observer"
    patch.setattr(torch._C, attach, cuda.watchers.append, raising=False)
    patch.setattr(torch.cuda.memory, "_record_memory_history", cuda.record_memory_history)
    patch.setattr(torch.cuda.memory, "_set_memory_metadata", cuda.set_memory_metadata)
    patch.setattr(torch.cuda.memory, "_snapshot", cuda.snapshot)
    patch.setattr(pynvml, "nvmlInit", nvml.init)
    patch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", nvml.handle)
    patch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: nvml.processes)
    patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=900))
    patch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "999.1")
    patch.setattr(pynvml, "nvmlDeviceGetSamples", nvml.get_samples)
