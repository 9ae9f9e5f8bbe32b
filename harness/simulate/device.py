"""The simulated GPU: it sees every operator on shape-only tensors, and counts its memory and time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch

from harness.kernel_time import cache_room
from harness.kernels import Free, Keep, Output, Step, Take, Unknown, operator_name, script_of
from harness.observe import StorageTracker
from harness.simulate.clock import Cost, SimulatedTime, is_on_device
from harness.simulate.cuda.behaviour import CudaRules
from harness.simulate.cuda.communication import KINDS, WAIT, Communication
from harness.simulate.cuda.divided_lists import on_local_parts
from harness.simulate.cuda.shape_cache import VIEW, Call, tensors_in
from harness.simulate.l2_cache import SHARED_BYTES, Again, L2Cache, TouchedTensor, touched_tensors
from harness.simulate.memory import SimulatedMemory
from harness.simulate.module_paths import ModulePaths
from harness.simulate.python_calls import PythonCalls
from harness.training import is_beside, is_on_host

aten = torch.ops.aten


class SimulatedDevice(StorageTracker):
    """While active, operators on shape-only tensors do to `memory` and `time` what they would do on a GPU.

    With `recorded` it keeps module paths and times, and with `frames` stacks, which cost more than the rest.
    """

    def __init__(
        self,
        memory: SimulatedMemory,
        rules: CudaRules,
        time: SimulatedTime,
        paths: ModulePaths,
        communication: Communication,
        beside: Sequence[SimulatedTime] = (),
    ) -> None:
        super().__init__(memory)
        self.recorded = False
        self.calls = PythonCalls()
        """What the program calls between its operators."""
        self.begin_own_work, self.end_own_work = self.calls.pause, self.calls.resume
        self.clocks = [time, *beside]
        """This device's clock, and those of others that run the same kernels at their own speed."""
        self.memory, self.rules, self.paths = memory, rules, paths
        self.operators: set[str] = set()
        """The names of the operators that ran on the device, without views."""
        self.communication = communication
        self._touched: dict[int, int] = {}
        """What operators have touched, by place: the value of `_touched_bytes` after the last time."""
        self._touched_bytes = 0
        # the room of each clock's device, and one account for all devices with as much
        self._rooms = [cache_room(clock.hardware) for clock in self.clocks]
        self._caches = {room: L2Cache(room) for room in self._rooms}
        self._workspaces: set[tuple[str, bool]] = set()
        """The workspaces that exist, by library and whether the thread is autograd's."""

    @contextmanager
    def host_followed(self) -> Iterator[None]:
        """Inside, while steps are recorded, the clocks are told of the Python that runs between operators."""
        if not self.recorded:
            yield
            return
        try:
            with self.calls.counting():
                yield
        finally:
            self._tell_of_calls(None)

    def _tell_of_calls(self, operator: Any) -> None:
        """Tell the clocks of what was called from the operator before to this one."""
        if number := self.calls.until(operator):  # there are none between most operators of backward
            for clock in self.clocks:
                clock.host_called(number)

    def unwrapped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See StorageTracker.unwrapped. Lists of divided weights are lists of this rank's parts."""
        found = on_local_parts(func, args, kwargs)
        if found is None:
            return NotImplemented
        local_args, local_kwargs, as_divided = found
        out = self.run(func, local_args, local_kwargs)
        self._see(out, func)
        return as_divided(out)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See StorageTracker.run."""
        if self.recorded:
            self.memory.module = self.paths.current()
        out, call = self.rules.run(func, args, kwargs)
        if call is VIEW:
            for clock in self.clocks if self.recorded else ():
                clock.host_viewed()
            return out
        if call.script is None:
            call.script = ()
            if is_on_device(out, args):
                call.script = script_of(func, args, kwargs, out, self.rules.gpu)
                self._note(operator_name(func), call.script)
        if call.script and not is_on_host():  # kernels of the host take nothing of the device
            self._play(call.script, func, out)
        if self.recorded:
            self._see(out, func)
            self._take_time(call, func, args, kwargs, out)
            if func is aten._local_scalar_dense.default and args[0].is_meta:
                for clock in self.clocks:  # the host waits for the value
                    clock.host_waits_until(clock.done_s(clock.stream))
        if "c10d" in func.namespace:
            self._communicate(operator_name(func), args, out)
        return out

    def _take_time(self, call: Call, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Let each clock take the time of one operator, whose results are allocated."""
        self._tell_of_calls(func)
        if call.cost is None:
            script = call.script or ()
            call.cost = [clock.cost(func, args, kwargs, out, script) for clock in self.clocks]
            moves = call.cost[0].bytes_moved
            call.tensors = touched_tensors(func, args, kwargs, out) if moves else []
        shares: list[float | None] = [None] * len(self.clocks)
        if call.tensors:
            touches = self._touch(call.tensors, (args, kwargs, out))
            by_room = {room: cache.held_share(touches) for room, cache in self._caches.items()}
            shares = [by_room[room] for room in self._rooms]
        self._clock(call.cost, func, args, shares)

    def _touch(self, tensors: Sequence[TouchedTensor], of_call: tuple[Any, ...]) -> list[Again]:
        """Note what an operator touches. Returns how long ago each of its tensors was touched before."""
        keys, blocks, last = self._keys, self.memory.blocks, self._touched
        found: list[tuple[int, TouchedTensor]] = []
        total = self._touched_bytes
        for tensor in tensors:
            path, size_bytes, _, _ = tensor
            value: Any = of_call
            for step in path:
                value = value[step]
            block = blocks.get(keys.get(value.untyped_storage()._cdata, -1))
            if block is not None:  # it is not the host's
                place = block.address
                if block.size > SHARED_BYTES:
                    place += value.storage_offset() * value.element_size()
                found.append((place, tensor))
                total += size_bytes
        self._touched_bytes = total
        again = [(total - last.get(place, -inf), tensor) for place, tensor in found]
        for place, _ in found:
            last[place] = total
        return again

    def _note(self, name: str, script: Sequence[Step]) -> None:
        """Add an operator to `operators`, or each of its ways of computing that nobody has looked at."""
        ways = [step.how for step in script if isinstance(step, Unknown)]
        self.operators.update(f"{name} ({how})" for how in ways) if ways else self.operators.add(name)

    def _communicate(self, name: str, args: Any, out: Any) -> None:
        """Report a collective, or the wait for one, to `communication`."""
        if name in KINDS:
            self.communication.launched(name, args, out, timed=self.recorded)
        elif name == WAIT:
            self.communication.waited(args[0])

    def _clock(
        self, costs: Sequence[Cost], func: Any, args: Any, held_shares: Sequence[float | None]
    ) -> None:
        """Let each clock take the time of an operator: a kernel, a copy over the link, work of the host."""
        backward = self.memory.phase == "backward"
        module = self.memory.module or (self.paths.of_last_node if backward else "")
        recomputing = backward and self.paths.in_module
        given: list[int] = []
        """The storages that it reads, where some are in the host's memory."""
        if self.on_host:
            given = [key for tensor in tensors_in(args) if (key := self.key_of(tensor)) is not None]
        there = [key in self.on_host for key in given]
        is_copy = func._overloadpacket is aten.copy_ and len(given) == 2 and there[0] != there[1]
        for clock, cost, held_share in zip(self.clocks, costs, held_shares, strict=True):
            clock.recomputing = recomputing
            if is_copy:
                target, source = given
                waits, beside = not (len(args) > 2 and args[2]), is_beside()  # the third: non_blocking
                clock.copy(args[0].nbytes, there[0], source, target, beside=beside, waits=waits)
            elif there and all(there):
                clock.work_on_host(cost, given)
            else:  # unified memory (paged optimizers) stays on the device while there is room
                clock.launch(cost, given, module, held_share)

    def synchronize(self) -> None:
        """torch.cuda.synchronize: the host waits until everything that was launched is done."""
        for clock in self.clocks if self.recorded else ():
            clock.host_waits_until(clock.now())

    def gone(self, key: int) -> None:
        """See StorageTracker.gone."""
        for clock in self.clocks:
            clock.freed(key)

    def _play(self, steps: Sequence[Step], func: Any, out: Any) -> None:
        """Allocate and free temporaries and outputs in the order in which the CUDA kernel does."""
        outputs = out if isinstance(out, list | tuple) else [out]
        keys: list[int] = []
        freed: set[int] = set()
        for step in steps:
            if isinstance(step, Take):
                frames = self.stack() if self.frames else ()
                keys.append(self.memory.temporary(step.size_bytes, func._overloadpacket.__name__, frames))
            elif isinstance(step, Free):
                freed.add(step.temporary)
                self.memory.release([keys[step.temporary]])
            elif isinstance(step, Keep):
                # cuBLAS and cuBLASLt each keep one for each thread, which are Python's and autograd's
                user = step.library, torch._C._current_autograd_node() is not None
                if user not in self._workspaces:
                    self._workspaces.add(user)
                    self.memory.keep_workspace(step.size_bytes)
            elif isinstance(step, Output):
                self._see(outputs[step.index], func)
        self._see(out, func)
        self.memory.release([key for n, key in enumerate(keys) if n not in freed])

    def follows(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is the device's. Tensors on the CPU (step counters, data at first) are not."""
        return storage.device.type == "meta"
