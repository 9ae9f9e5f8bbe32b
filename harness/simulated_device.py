"""A GPU that is not there: every operator on shape-only tensors, its memory, its time."""

from __future__ import annotations

from typing import Any

import torch

from harness.cuda_rules import CudaRules
from harness.module_paths import ModulePaths
from harness.simulated_memory import SimulatedMemory
from harness.simulated_time import SimulatedTime
from harness.tracker import StorageTracker

_THREADS = ("python", "autograd")


class SimulatedDevice(StorageTracker):
    """While active, operators on shape-only tensors do to `memory` and `time` what they would do on a GPU."""

    def __init__(
        self, memory: SimulatedMemory, rules: CudaRules, time: SimulatedTime, paths: ModulePaths
    ) -> None:
        super().__init__(memory)
        self.memory, self.rules, self.time, self.paths = memory, rules, time, paths
        self._workspaces: set[str] = set()

    @property
    def recorded(self) -> bool:
        """Whether stacks, module paths and times are kept: they cost more than the rest."""
        return self.frames

    @recorded.setter
    def recorded(self, value: bool) -> None:
        self.frames = value

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See StorageTracker.run."""
        if self.recorded:
            self.memory.module = self.paths.current()
        if len(self._workspaces) < len(_THREADS):
            self._allocate_workspace(func)
        temporaries = self.rules.temporaries(func, args, kwargs)
        held = self.memory.temporaries(temporaries, str(func), self.stack()) if temporaries else ()
        try:
            out = self.rules.run(func, args, kwargs)
            if self.recorded:
                self.time.add(func, args, kwargs, out)
            if held:
                self._see(out, func)  # before the temporaries are freed
        finally:
            if held:
                self.memory.release(held)
        return out

    def follows(self, storage: torch.UntypedStorage) -> bool:
        """Tensors on the CPU (the data before it moves, step counters) are the host's own."""
        return storage.device.type == "meta"

    def _allocate_workspace(self, func: Any) -> None:
        """cuBLAS keeps one workspace for each thread that multiplies: Python's, and autograd's."""
        thread = _THREADS[torch._C._current_autograd_node() is not None]
        if thread in self._workspaces or not self.rules.multiplies(func):
            return
        self._workspaces.add(thread)
        self.memory.keep_workspace(self.rules.workspace_bytes)
