"""A trace's times moved to a virtual device's clock: by hand, on a device that is not there."""

import pytest

from harness.measure import virtual_time
from harness.measure.virtual_time import VirtualTime


def marked(monkeypatch: pytest.MonkeyPatch, *marks: tuple[int, int]) -> VirtualTime:
    """Of these moments: microseconds of the host, and of the device."""
    here = VirtualTime(0)
    monkeypatch.setattr(virtual_time, "has_clock", lambda: True)
    for host_us, device_us in marks:
        monkeypatch.setattr(virtual_time.time, "time_ns", lambda at=host_us: at * 1000)
        monkeypatch.setattr(virtual_time, "device_worked_us", lambda index, at=device_us: at)
        here.mark()
    return here


def moved(times: VirtualTime, *given: int) -> list[int]:
    trace = [{"time_us": time_us} for time_us in given]
    times.put_into(trace)
    return [entry["time_us"] for entry in trace]


def test_between_two_marks_times_are_in_proportion(monkeypatch: pytest.MonkeyPatch):
    """The device is busy for 400 us where the host takes 100, and idle while the host takes the next 100."""
    times = marked(monkeypatch, (1000, 50), (1100, 450), (1200, 450))
    assert moved(times, 1000, 1025, 1100, 1150, 1200, 1300) == [1000, 1100, 1400, 1400, 1400, 1400]


def test_a_clock_that_begins_within_the_trace_knows_no_times(monkeypatch: pytest.MonkeyPatch):
    assert moved(marked(monkeypatch, (1000, 0), (1100, 400)), 900, 1050) == [0, 1]
    assert moved(marked(monkeypatch), 900, 1050) == [0, 1]


def test_a_real_device_keeps_its_times():
    times = VirtualTime(0)
    times.mark()
    assert moved(times, 900, 1050) == [900, 1050]
