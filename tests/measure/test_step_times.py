"""The statistics of a measured run, against numbers worked out by hand: steps, waiting for other ranks from
the profiler's events, and a trace's times moved to a virtual device's clock."""

import json
import math
import resource
import statistics
import sys
from types import SimpleNamespace

import pytest

from harness.measure import virtual_time
from harness.measure.communication import PHASE, waiting
from harness.measure.step_times import log_line, peak_rss_bytes, phase_stats, step_stats
from harness.measure.virtual_time import VirtualTime
from harness.observe.flops import FlopCount
from harness.step_profile.step_profile import HardwareSummary
from harness.step_profile.times import PhaseStats

TOKENS = 2 * 3 * 100
DEVICE = HardwareSummary(name="a device", kind="cuda", peak_flops=1000.0)
TIMES = [{"step": float(n), "forward": n / 10} for n in range(21)]  # 0, 1, ... 20 seconds
COUNTED = FlopCount()
COUNTED.flops |= {"forward": 300, "backward": 900}
COUNTED.recomputed_flops = 240  # of the 900


def test_percentiles_are_the_10th_and_the_90th():
    time_s = step_stats(TOKENS, DEVICE, TIMES, None).time_s
    assert (time_s.p10, time_s.median, time_s.p90, time_s.n) == (2.0, 10.0, 18.0, 21)
    # Python's own, inclusive as numpy's linear interpolation
    deciles = statistics.quantiles([times["step"] for times in TIMES], n=10, method="inclusive")
    assert (time_s.p10, time_s.p90) == (deciles[0], deciles[-1])
    uneven = step_stats(TOKENS, DEVICE, [{"step": s} for s in (9.0, 1.0, 2.0, 4.0)], None).time_s
    assert uneven.p10 == pytest.approx(1.3)  # 0.3 of the way from the first to the second
    assert uneven.p90 == pytest.approx(7.5)  # 0.7 of the way from the third to the fourth


def test_mfu_counts_what_the_model_needs_and_hfu_what_the_device_did():
    stats = step_stats(TOKENS, DEVICE, TIMES, COUNTED)
    assert stats.model_flops == 300 + 900 - 240
    assert stats.mfu == pytest.approx(960 / (1000.0 * 10))
    assert stats.hfu == pytest.approx(1200 / (1000.0 * 10))


def test_tokens_per_second_are_those_of_the_whole_step_at_its_median():
    assert step_stats(TOKENS, DEVICE, TIMES, None).tokens_per_s == TOKENS / 10


def test_what_is_not_known_is_none():
    nothing = step_stats(TOKENS, DEVICE, [], None)
    assert (nothing.time_s.median, nothing.tokens_per_s, nothing.mfu, nothing.hfu) == (None, None, None, None)
    unlisted = step_stats(TOKENS, HardwareSummary(name="other", kind="cuda"), TIMES, COUNTED)
    assert (unlisted.model_flops, unlisted.mfu, unlisted.hfu) == (960, None, None)


def test_a_phase_has_its_own_times_flops_and_memory():
    stats = phase_stats({"forward": PhaseStats(peak_allocated_bytes=7)}, TIMES, COUNTED)
    forward = stats["forward"]
    assert (forward.peak_allocated_bytes, forward.flops) == (7, 300)
    assert (forward.time_s.p10, forward.time_s.median, forward.time_s.p90) == (0.2, 1.0, 1.8)
    assert (stats["backward"].flops, stats["optimizer_step"].flops) == (900, 0)
    assert stats["backward"].time_s.n == 0
    assert phase_stats({}, TIMES, None)["forward"].flops is None


def test_a_phase_that_is_in_no_step_is_told_of_only_where_there_was_one():
    assert list(phase_stats({}, TIMES, None)) == ["data", "forward", "backward", "optimizer_step"]
    more = phase_stats({"saving": PhaseStats(peak_allocated_bytes=9)}, [*TIMES, {"evaluation": 3.0}], None)
    assert (more["saving"].peak_allocated_bytes, more["evaluation"].time_s.median) == (9, 3.0)
    assert len(more) == 6


def test_a_line_of_the_log_says_the_step_and_its_times():
    line = log_line(3, "timed", 64, 2.5, {"step": 0.5, "forward": 0.25})
    assert line == {
        "step": 3,
        "kind": "timed",
        "num_tokens": 64,
        "loss": 2.5,
        "step_s": 0.5,
        "forward_s": 0.25,
    }
    assert log_line(0, "warmup", None, None, {}) == {
        "step": 0,
        "kind": "warmup",
        "num_tokens": None,
        "loss": None,
    }


@pytest.mark.parametrize(("loss", "named"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_not_finite_is_named_and_the_line_is_json(loss, named):
    line = log_line(3, "timed", 64, loss, {"step": 0.5})
    assert line == {
        "step": 3,
        "kind": "timed",
        "num_tokens": 64,
        "loss": None,
        "not_finite": named,
        "step_s": 0.5,
    }
    json.dumps(line, allow_nan=False)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_resident_memory_is_this_process_in_bytes(platform, unit, monkeypatch):
    """getrusage(2): kilobytes on Linux, bytes on macOS; of children it says something else."""
    usage = {resource.RUSAGE_SELF: 7, resource.RUSAGE_CHILDREN: 99}
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=usage[who]))
    monkeypatch.setattr(sys, "platform", platform)
    assert peak_rss_bytes() == 7 * unit


def test_waiting_is_what_no_operator_covers_by_hand() -> None:
    events = [
        (PHASE + "forward", (0, 100)),
        (PHASE + "backward", (100, 200)),
        ("FSDP::all_gather", (5, 60)),  # it waits, too
        ("gloo:all_gather", (10, 50)),
        ("aten::mm", (40, 60)),  # covers 10 of 40
        ("aten::t", (41, 42)),  # within another one
        ("gloo:all_reduce", (90, 120)),  # 10 in forward, 20 in backward
        ("gloo:all_reduce", (110, 130)),  # both at once: counted once
        ("aten::add", (125, 150)),
        ("_c10d_functional::wait_tensor", (126, 129)),  # which add called
        ("gloo:all_reduce", (300, 400)),  # in no phase
    ]
    assert waiting(events) == {"forward": 30 + 10, "backward": 20 + 5 + 3}


@pytest.mark.parametrize("operator", [(0, 100), (10, 50)])
def test_communication_that_operators_cover_is_not_waited_for(operator: tuple[int, int]) -> None:
    events = [(PHASE + "backward", (0, 100)), ("gloo:all_reduce", (10, 50)), ("aten::mm", operator)]
    assert waiting(events) == {"backward": 0}


def test_a_rank_alone_waits_for_nobody() -> None:
    assert waiting([(PHASE + "forward", (0, 9)), ("aten::mm", (1, 8))]) == {"forward": 0}
    assert waiting([]) == {}


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
