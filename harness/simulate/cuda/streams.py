"""Streams and events of a simulated GPU, in a module `torch.meta` that stands for torch.cuda.

Libraries for several kinds of devices use the module of torch that is named like the device's type. The
allocator keeps the memory of each stream apart, and on the clock each executes its operators in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.hardware import GPUS_PER_NODE
from harness.simulate.clock import SimulatedTime
from harness.simulate.memory import SimulatedMemory

DEFAULT_STREAM = 0


class Event:
    """torch.cuda.Event: a moment in the work of a stream, which has its own time on each clock."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._moments_s = [0.0] * len(streams.clocks)

    def record(self, stream: Stream | None = None) -> None:
        """Let the event fire when `stream` (None: the current one) has executed what it was given so far."""
        number = (stream or self._streams.current_stream()).stream_id
        self._moments_s = [clock.done_s(number) for clock in self._streams.clocks]

    def wait(self, stream: Stream | None = None) -> None:
        """Let what is launched on `stream` (None: the current one) from now on begin when the event fires."""
        number = (stream or self._streams.current_stream()).stream_id
        for clock, moment_s in zip(self._streams.clocks, self._moments_s, strict=True):
            clock.wait(number, moment_s)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        for clock, moment_s in zip(self._streams.clocks, self._moments_s, strict=True):
            clock.host_waits_until(moment_s)


class Stream:
    """torch.cuda.Stream on the only device. FSDP2 of PyTorch 2.15 identifies a stream by device_index,
    device_type and stream_id."""

    device_index = 0
    device_type = 1
    """c10::DeviceType::CUDA."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self.stream_id = number

    def record_event(self, event: Event | None = None) -> Event:
        """See Event.record."""
        event = event or self._streams.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """See Event.wait."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Let what is launched from now on begin when `other` has executed what was launched on it so far."""
        self.wait_event(other.record_event())


class Streams:
    """The module `torch.meta` while a GPU is simulated, with the names of torch.cuda. `clocks` are the GPU's
    own and those of other devices that run with it."""

    def __init__(self, memory: SimulatedMemory, *clocks: SimulatedTime) -> None:
        self.memory, self.clocks = memory, clocks
        self._current = self._default = Stream(self, DEFAULT_STREAM)
        self._made = DEFAULT_STREAM

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        """A new stream, for which the allocator keeps a pool of its own."""
        self._made += 1
        return Stream(self, self._made)

    def Event(self, enable_timing: bool = False) -> Event:
        """A new event."""
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        """The stream on which operators are launched and memory is allocated now."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Inside, operators are launched and memory is allocated on `stream`."""
        before = self._current
        self._enter(stream)
        try:
            yield
        finally:
            self._enter(before)

    def current_device(self) -> int:
        """The number of the only device."""
        return 0

    def device_count(self) -> int:
        """The GPUs of a node: DTensor's choices depend on which ranks are on the same node."""
        return GPUS_PER_NODE

    def _enter(self, stream: Stream) -> None:
        """Make `stream` the current one, of the allocator and of the clocks too."""
        self._current = stream
        self.memory.stream = stream.stream_id
        for clock in self.clocks:
            clock.stream = stream.stream_id
