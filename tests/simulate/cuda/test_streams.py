"""Streams of a simulated GPU: a pool of memory each, and their order in time, worked out by hand."""

from typing import Any

import torch

from harness.allocator.settings import Settings
from harness.hardware.hardware import find_hardware
from harness.observe.storage_tracker import StorageTracker
from harness.simulate.clock import Cost, SimulatedTime
from harness.simulate.cuda.streams import Streams
from harness.simulate.memory import SimulatedMemory

MiB = 2**20


def gpu() -> tuple[SimulatedMemory, SimulatedTime, Streams]:
    memory, time = SimulatedMemory(Settings(), None), SimulatedTime(find_hardware("h100"))
    return memory, time, Streams(memory, time)


def born(memory: SimulatedMemory, key: int, size_bytes: int) -> None:
    memory.born(key, size_bytes, False, "made", ())


def test_out_of_memory_all_streams_give_back_what_they_cached() -> None:
    memory = SimulatedMemory(Settings(), 100 * MiB)
    streams = Streams(memory, SimulatedTime(find_hardware("h100")))
    with streams.stream(streams.Stream()):
        born(memory, 0, 60 * MiB)
        memory.died(0, 60 * MiB, False)
    born(memory, 1, 80 * MiB)
    assert memory.allocator.reserved_bytes == 80 * MiB


def test_a_step_is_repeated_on_the_streams_it_ran_on() -> None:
    memory, _, streams = gpu()
    other = streams.Stream()
    memory.restart()
    memory.phase = "forward"
    memory.reset_peak()
    born(memory, 0, 30 * MiB)
    memory.died(0, 30 * MiB, False)
    with streams.stream(other):
        born(memory, 1, 30 * MiB)
    memory.died(1, 30 * MiB, False)
    assert memory.repeat(1) == {"forward": (30 * MiB, 60 * MiB)}


def test_the_snapshot_names_the_streams() -> None:
    memory, _, streams = gpu()
    memory.restart()
    with streams.stream(streams.Stream()):
        born(memory, 0, 30 * MiB)
    entries = memory.snapshot()["device_traces"][0]
    assert {entry["stream"] for entry in entries if "alloc" in entry["action"]} == {1}


def test_streams_work_at_the_same_time_and_events_order_them() -> None:
    """3 s on the default stream, 2 s on another. What waits for the other's event begins where both end."""
    _, time, streams = gpu()
    other = streams.Stream()
    start_s = time.now()
    work = Cost(0, 1, 0.0, 3.0)
    time.launch(work)
    with streams.stream(other):
        time.launch(work._replace(memory_s=2.0))
        done = other.record_event()
    assert round(time.now() - start_s, 3) == 3
    streams.current_stream().wait_event(done)  # it is over already
    time.launch(work)
    assert round(time.now() - start_s, 3) == 6
    other.wait_stream(streams.current_stream())
    with streams.stream(other):
        time.launch(work)
    assert round(time.now() - start_s, 3) == 9


def test_waiting_for_a_collective_is_communication_where_it_is_not_hidden() -> None:
    """1 s of work, and 3 s of a collective beside it: 2 s are waited for."""
    _, time, streams = gpu()
    time.phase = "forward"
    with streams.stream(streams.Stream()):
        time.communicate(3.0, time.stream)
        gathered = streams.current_stream().record_event()
    time.launch(Cost(0, 1, 0.0, 1.0))
    streams.current_stream().wait_event(gathered)
    assert round(time.communication_s["forward"], 3) == 2
    time.communicate(1.0, 0)  # on the default stream nothing else runs
    assert round(time.communication_s["forward"], 3) == 3


class _Sizes:
    def __init__(self) -> None:
        self.told: list[int] = []

    def born(self, key: int, size_bytes: int, on_host: bool, op: str, frames: Any, *_: Any) -> None:
        self.told.append(size_bytes)

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        self.told.append(-size_bytes)


def test_a_storage_that_is_resized_is_freed_and_made_anew() -> None:
    """FSDP2 frees and takes a gathered weight's memory so (_fsdp_param.py, free_storage, alloc_storage)."""
    sink = _Sizes()
    with StorageTracker(sink):
        weight = torch.empty(8)
        view = weight.view(2, 4)
        weight.untyped_storage().resize_(0)
        assert view.untyped_storage().nbytes() == 0
        weight.untyped_storage().resize_(32)
        weight.untyped_storage().resize_(64)  # what was there is copied before it is freed
        del weight, view
    assert sink.told == [32, -32, 32, 64, -32, -64]
    assert torch.empty(8).untyped_storage().resize_(0).nbytes() == 0  # torch's own again
