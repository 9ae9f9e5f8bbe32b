"""Spans from CUDA traces: reused addresses, what was there before, phases across threads, labels."""

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.snapshot import BEFORE_RECORDING, categorize, find_peak
from harness.snapshot.trace import Label, phase_metadata, phase_of, spans_from_trace, stated_phases, step_ends


def entry(action: str, addr: int, size: int, metadata: str = "", time_us: int = 0, **more: object) -> dict:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "user_metadata": metadata,
        "time_us": time_us,
        **more,
    }


@st.composite
def allocator_runs(draw: st.DrawFn):
    """A toy allocator of 8 slots: (trace, segments at the end, live bytes before and after each entry)."""
    slot_bytes = 4096
    live: dict[int, tuple[int, int]] = {}  # address -> (requested, block)
    trace, totals = [], [0]
    for _ in range(draw(st.integers(1, 50))):
        free_slots = [i * slot_bytes for i in range(8) if i * slot_bytes not in live]
        if live and (not free_slots or draw(st.booleans())):
            address = draw(st.sampled_from(sorted(live)))
            requested, _ = live.pop(address)
            # torch writes two entries; "allocated" falls at the first.
            trace += [
                entry("free_requested", address, requested),
                entry("free_completed", address, requested),
            ]
            totals += [sum(block for _, block in live.values())] * 2
        else:
            requested = draw(st.integers(1, slot_bytes))
            block = (requested + 511) // 512 * 512
            address = draw(st.sampled_from(free_slots))
            live[address] = (requested, block)
            trace.append(entry("alloc", address, requested))
            totals.append(sum(block for _, block in live.values()))
        if draw(st.booleans()):
            trace.append(entry("segment_alloc", 10**6 + len(trace), 2**21))
            totals.append(totals[-1])
    blocks = []
    for address in range(0, 8 * slot_bytes, slot_bytes):
        requested, block = live.get(address, (0, 0))
        if block:
            blocks.append({"size": block, "requested_size": requested, "state": "active_allocated"})
        if block < slot_bytes:
            blocks.append({"size": slot_bytes - block, "requested_size": 0, "state": "inactive"})
    segment = {"address": 0, "total_size": 8 * slot_bytes, "stream": 0, "blocks": blocks}
    return trace, [segment], totals


@settings(max_examples=100)
@given(allocator_runs(), st.data())
def test_live_bytes_are_those_of_the_allocator_even_from_a_cut_trace(run, data: st.DataObject) -> None:
    trace, segments, totals = run
    # Recording may start late, and a full ring buffer forgets the oldest entries: drop the first few,
    # but never between the two entries of one free.
    starts = [i for i in range(len(trace) + 1) if i == len(trace) or trace[i]["action"] != "free_completed"]
    start = data.draw(st.sampled_from(starts))
    spans = spans_from_trace(trace[start:], segments=segments)
    for index in range(BEFORE_RECORDING, len(trace) - start):
        assert sum(s.size_bytes for s in spans if s.live_at(index)) == totals[start + index + 1]
    assert find_peak(spans).allocated_bytes == max(totals[start:])


def test_sizes_are_blocks_exact_where_they_are_known() -> None:
    trace = [entry("alloc", 0, 1), entry("alloc", 4096, 5 * 2**20), entry("alloc", 2**30, 512)]
    segment = {"address": 2**30, "blocks": [{"size": 1024, "state": "active_allocated"}]}
    assert [s.size_bytes for s in spans_from_trace(trace)] == [512, 5 * 2**20, 512]
    spans = spans_from_trace(trace, segments=[segment])
    assert [s.size_bytes for s in spans] == [512, 5 * 2**20, 1024]


def test_metadata_round_trip() -> None:
    assert phase_metadata("forward", 3) == "step=3 phase=forward"
    assert phase_of(phase_metadata("optimizer_step", 0)) == "optimizer_step"
    assert phase_of(phase_metadata("setup")) == "setup"
    assert phase_of(phase_metadata("setup", -1)) == "setup"  # as a measured run has it
    assert phase_of("my own note, phase=3") is None


def test_a_step_ends_with_its_last_entry_and_setup_is_none() -> None:
    texts = ["step=-1 phase=setup", "step=0 phase=forward", "", "step=1 phase=data", "step=1 phase=forward"]
    assert step_ends([entry("alloc", 512 * n, 512, text) for n, text in enumerate(texts)]) == [2, 4]


def test_entries_of_the_autograd_thread_belong_to_the_backward_that_waits_for_it() -> None:
    forward, backward, optimizer = (phase_metadata(p, 1) for p in ("forward", "backward", "optimizer_step"))
    trace = [
        entry("alloc", 1, 512, forward),
        entry("alloc", 2, 512, backward),  # the root gradient, on the calling thread
        entry("alloc", 3, 512, ""),  # autograd's thread has no metadata
        entry("free_requested", 1, 512, ""),
        entry("alloc", 4, 512, optimizer),
    ]
    assert stated_phases(trace) == [forward, backward, backward, backward, optimizer]
    spans = spans_from_trace(trace)
    assert [s.birth_phase for s in spans] == ["forward", "backward", "backward", "optimizer_step"]
    assert spans[0].death_phase == "backward"
    assert categorize(spans)[0] == "activations"
    # Older torch has no metadata at all: the phase is unknown, not an error.
    assert spans_from_trace([{"action": "alloc", "addr": 1, "size": 1}])[0].birth_phase is None


def test_labels_find_the_allocation_that_lived_there_then() -> None:
    trace = [
        entry("alloc", 100, 512, time_us=10),  # a parameter, kept
        entry("alloc", 200, 512, time_us=20),  # a gradient ...
        entry("free_requested", 200, 512, time_us=30),
        entry("alloc", 200, 1024, time_us=40),  # ... and something else at its address
        entry("free_requested", 300, 2048, time_us=50),  # there before the recording
    ]
    labels = [
        Label(100, "parameters", "lm_head"),
        Label(100, "gradients", "tied"),  # the first holds
        Label(200, "gradients", "layers.0", time_us=25),
        Label(300, "inputs", None, time_us=0),
        Label(999, "parameters", "on the host"),
    ]
    spans = spans_from_trace(trace, labels)
    assert [(s.address, s.size_bytes, s.category, s.module) for s in spans] == [
        (100, 512, "parameters", "lm_head"),
        (200, 512, "gradients", "layers.0"),
        (200, 1024, None, None),
        (300, 2048, "inputs", None),
    ]
    late = spans_from_trace(trace, [Label(200, "gradients", time_us=30), Label(200, "optimizer_state")])
    assert [s.category for s in late if s.address == 200] == [None, "optimizer_state"]


def test_blocks_from_before_a_recording_have_their_stack_and_can_be_labelled() -> None:
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 1024, "state": "active_allocated", "frames": frames},
        {"size": 512, "state": "active_pending_free"},  # its free was requested: no longer allocated
    ]
    spans = spans_from_trace([], [Label(1512, "parameters")], [{"address": 1000, "blocks": blocks}])
    assert [(s.address, s.size_bytes, s.born, s.category, s.frames) for s in spans] == [
        (1512, 1024, BEFORE_RECORDING, "parameters", frames)
    ]
