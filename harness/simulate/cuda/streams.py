"""Streams and events of a simulated GPU: what torch.cuda is to a GPU, as the module `torch.meta`.

Libraries that serve several kinds of devices ask for the module called as the device's type. The allocator
keeps the memory of each stream apart, and the clock lets each work off its own operators in order.
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
    """torch.cuda.Event: a moment in the work of a stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._moments_s = [0.0] * len(streams.clocks)

    def record(self, stream: Stream | None = None) -> None:
        """The event fires when `stream` (default: the current one) has done what it was given."""
        number = (stream or self._streams.current_stream()).stream_id
        self._moments_s = [clock.done_s(number) for clock in self._streams.clocks]

    def wait(self, stream: Stream | None = None) -> None:
        """What `stream` is given from now on begins when the event has fired."""
        number = (stream or self._streams.current_stream()).stream_id
        for clock, moment_s in zip(self._streams.clocks, self._moments_s, strict=True):
            clock.wait(number, moment_s)

    def synchronize(self) -> None:
        """The host goes on when the event has fired."""
        for clock, moment_s in zip(self._streams.clocks, self._moments_s, strict=True):
            clock.host_waits_until(moment_s)


class Stream:
    """torch.cuda.Stream, on the one device there is; FSDP2 of PyTorch 2.15 names a stream by these three."""

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
        """Begin what follows when `other` has done what it was given."""
        self.wait_event(other.record_event())


class Streams:
    """The module `torch.meta` while a GPU is simulated; names are those of torch.cuda. `clocks`: the GPU's
    own, and those of others that hear the same."""

    def __init__(self, memory: SimulatedMemory, *clocks: SimulatedTime) -> None:
        self.memory, self.clocks = memory, clocks
        self._current = self._default = Stream(self, DEFAULT_STREAM)
        self._made = DEFAULT_STREAM

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        """A new stream, with a pool of memory of its own."""
        self._made += 1
        return Stream(self, self._made)

    def Event(self, enable_timing: bool = False) -> Event:
        """A new event."""
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that operators and allocations are of now."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Operators and allocations inside are of `stream`."""
        before = self._current
        self._enter(stream)
        try:
            yield
        finally:
            self._enter(before)

    def current_device(self) -> int:
        """There is one."""
        return 0

    def device_count(self) -> int:
        """As many as a node has: DTensor weighs its ways by which ranks are on one."""
        return GPUS_PER_NODE

    def _enter(self, stream: Stream) -> None:
        self._current = stream
        self.memory.stream = stream.stream_id
        for clock in self.clocks:
            clock.stream = stream.stream_id
