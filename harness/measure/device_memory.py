"""PyTorch's counters and history of a GPU's memory, in a process of our own or beside a program that uses
them too.

A process has one set of peaks and one history, and whoever resets them or switches them off does so for
everybody. `SharedMemory` therefore stands between a watched program and PyTorch: the program and we each have
peaks since our own last reset, and a history since our own begin of recording. The program uses functions of
torch.cuda, which call functions that are replaced here and nowhere else. Written against torch 2.11 to 2.15.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from harness.snapshot import phase_of

MAX_ENTRIES = 2_000_000
"""The most entries of a recorded history; a step of a 70B model has about 100,000."""
Stats = Mapping[str, Any]
"""Counters as torch.cuda.memory_stats_as_nested_dict gives them."""


class Counted(NamedTuple):
    """Bytes by the allocator's counters, now and at the peak since the last reset."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int


class DeviceMemory:
    """The memory of one device, in a process in which nothing else resets counters or records."""

    def __init__(self, index: int) -> None:
        self.index = index

    def counted(self) -> Counted:
        """The counters now, with the peaks since the last `reset_peaks`."""
        # not torch.cuda.memory_stats, nor what calls it: it renames and sorts a hundred counters
        return _counted(torch.cuda.memory.memory_stats_as_nested_dict(self.index))

    def reset_peaks(self) -> None:
        """Begin new peaks at what is allocated and reserved now."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def highest(self) -> Counted:
        """The counters now, with the peaks since the process began, whoever reset them meanwhile."""
        return self.counted()

    def record(self, on: bool) -> None:
        """Begin a history, or end and forget it."""
        if on:
            # "python": the default symbolizes C++ frames too, which takes minutes
            torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python", context="all")
        else:
            torch.cuda.memory._record_memory_history(enabled=None)

    def snapshot(self) -> dict[str, Any]:
        """The segments now and the history since `record(True)`, as torch.cuda.memory._snapshot has them."""
        snapshot: Any = torch.cuda.memory._snapshot()
        return snapshot


class SharedMemory(DeviceMemory):
    """The memory of one device, beside a program that may reset counters and record too. What it replaces
    stays replaced when the watching is over: the program may ask for its peak afterwards.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._between = _between()

    def counted(self) -> Counted:
        return _counted(self._between.stats_of_ours(self.index))

    def reset_peaks(self) -> None:
        self._between.reset_ours(self.index)

    def highest(self) -> Counted:
        return _counted(self._between.highest(self.index))

    def record(self, on: bool) -> None:
        self._between.record_ours(on)

    def snapshot(self) -> dict[str, Any]:
        return self._between.snapshot_of_ours()


class _Recording(NamedTuple):
    """The program's own history."""

    begin: Callable[[], object]
    """Begins it anew, with the program's own arguments."""
    stacks: str
    max_entries: int
    since_us: int
    """When it began, in microseconds since 1970."""


class _Between:
    """Stands between the program ("theirs") and us ("ours"), so that the program sees what it would see if
    nothing watched it."""

    def __init__(self) -> None:
        self._ours: dict[int, Stats] = {}
        self._theirs: dict[int, Stats] = {}
        """By device, the peaks that the other side's resets erased since this side's own last reset."""
        self._before: dict[int, Stats] = {}
        """By device, the peaks before any reset."""
        self._since_us: int | None = None
        """When our recording began, in microseconds since 1970; None while we do not record."""
        memory = torch.cuda.memory
        program_call = getattr(memory._record_memory_history_impl, "asked", None)  # harness/watching/startup
        self._stats = _replaced(torch._C, "_cuda_memoryStats", self._stats_of_theirs)
        self._reset = _replaced(torch._C, "_cuda_resetPeakMemoryStats", self._reset_theirs)
        # torch.accelerator's names for the same
        _replaced(torch._C, "_accelerator_getDeviceStats", self._stats_of_theirs)
        _replaced(torch._C, "_accelerator_resetPeakStats", self._reset_theirs)
        self._snapshot = _replaced(torch._C, "_cuda_memorySnapshot", self._snapshot_of_theirs)
        self._record = _replaced(memory, "_record_memory_history_impl", self._record_theirs)
        self._their_recording: _Recording | None = None
        """The program's recording, while it records."""
        if torch._C._cuda_isHistoryEnabled():  # type: ignore[attr-defined]
            args, kwargs = program_call or ((), {})
            self._their_recording = self._recording(0, *args, **kwargs)

    # Counters.

    def stats_of_ours(self, device: int) -> Stats:
        return _higher(self._stats(device), self._ours.get(device, {}))

    def highest(self, device: int) -> Stats:
        return _higher(self._stats(device), self._before.get(device, {}))

    def reset_ours(self, device: int) -> None:
        self._set_back(device, self._ours, self._theirs)

    def _stats_of_theirs(self, device: int) -> Stats:
        return _higher(self._stats(device), self._theirs.get(device, {}))

    def _reset_theirs(self, device: int) -> None:
        self._set_back(device, self._theirs, self._ours)

    def _set_back(self, device: int, own: dict[int, Stats], other: dict[int, Stats]) -> None:
        """Reset the counters for one side (`own`), and keep the peaks that are erased for the `other`."""
        counted = self._stats(device)
        for peaks in (other, self._before):
            peaks[device] = _higher(counted, peaks.get(device, {}))
        own.pop(device, None)
        self._reset(device)

    # History.

    def record_ours(self, on: bool) -> None:
        theirs = self._their_recording
        self._since_us = _now_us() if on else None
        if on and theirs is not None:  # with the program's kind of stacks, and room for both histories
            self._record("all", "all", theirs.stacks, max(theirs.max_entries, MAX_ENTRIES))
        elif on:
            self._record("all", "all", "python", MAX_ENTRIES, clear_history=True)
        elif theirs is not None:
            theirs.begin()
        else:
            self._record(None)

    def snapshot_of_ours(self) -> dict[str, Any]:
        return _since(self._snapshot(None), self._since_us)

    def _recording(self, since_us: int, *args: Any, **kwargs: Any) -> _Recording:
        bound = inspect.signature(self._record).bind(*args, **kwargs)
        bound.apply_defaults()
        given = {**bound.arguments, "clear_history": False}
        begin = partial(self._record, **given)
        return _Recording(begin, given["stacks"], given["max_entries"], since_us)

    def _record_theirs(self, enabled: str | None = "all", *args: Any, **kwargs: Any) -> None:
        before = self._their_recording
        if enabled is None:
            self._their_recording = None
            if self._since_us is None:
                self._record(None)
            return
        if self._since_us is None:
            self._record(enabled, *args, **kwargs)
        goes_on = before is not None and not kwargs.get("clear_history")
        since_us = before.since_us if before is not None and goes_on else _now_us()
        self._their_recording = self._recording(since_us, enabled, *args, **kwargs)
        if self._since_us is not None:
            since, self._since_us = self._since_us, None
            self.record_ours(True)
            self._since_us = since

    def _snapshot_of_theirs(self, *asked: Any) -> dict[str, Any]:
        theirs = self._their_recording
        shown = self._snapshot(*asked)
        if self._since_us is not None or theirs is not None:
            shown = _since(shown, None if theirs is None else theirs.since_us)
        for trace in shown["device_traces"]:
            if theirs is not None:
                # PyTorch adds an entry for every snapshot, and some were ours
                trace[:] = [entry for entry in trace if entry["action"] != "snapshot"][-theirs.max_entries :]
            for entry in trace:
                if phase_of(entry.get("user_metadata") or ""):
                    entry["user_metadata"] = ""
        return shown


_between = cache(_Between)
"""The one _Between of this process."""


def _replaced(place: Any, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `place`'s `name` by `ours`. Returns the original, or `ours` where a release has none."""
    original = getattr(place, name, None)
    if original is None:
        return ours
    setattr(place, name, ours)
    return original


def _counted(stats: Stats) -> Counted:
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return Counted(allocated["current"], allocated["peak"], reserved["current"], reserved["peak"])


def _higher(stats: Stats, before: Stats) -> Stats:
    """`stats`, with each peak at least as high as in `before`."""
    if not before:
        return stats
    return {
        name: max(value, before.get(name, 0))
        if name == "peak"
        else _higher(value, before.get(name, {}))
        if isinstance(value, dict)
        else value
        for name, value in stats.items()
    }


def _since(snapshot: dict[str, Any], since_us: int | None) -> dict[str, Any]:
    """The snapshot with the history's entries since `since_us` only; without any for None."""
    traces = [
        [] if since_us is None else [entry for entry in trace if entry.get("time_us", since_us) >= since_us]
        for trace in snapshot["device_traces"]
    ]
    return {**snapshot, "device_traces": traces}


def _now_us() -> int:
    return time.time_ns() // 1000
