"""The memory of a simulated GPU: blocks instead of bytes, and a snapshot that torch's own viewers accept."""

import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from harness.allocator import AllocatorOutOfMemory, Settings, parse_settings
from harness.hardware.hardware import find_hardware
from harness.simulate import SimulatedMemory, simulate
from harness.snapshot import find_peak, phase_of, spans_from_trace
from harness.snapshot.shape import validate_snapshot
from harness.step_profile.step_profile import StepProfile
from tests.support.memory_viz import check_torch_reads
from tests.support.tiny import tiny

MiB = 2**20
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"gradient_accumulation_steps": 2},
    "lora": {"adapter": "lora", "seq_len": 256, "gradient_checkpointing": True, "precision": "bf16-mixed"},
    "in backward": {"optimizer_in_backward": True, "precision": "bf16"},
    "qlora": {
        "adapter": "lora",
        "quantization": "nf4",
        "precision": "bf16-mixed",
        "upcast_for_kbit": True,
        "gradient_checkpointing": True,
    },
}


@cache
def simulated(name: str, settings: str = "") -> tuple[StepProfile, dict[str, Any]]:
    recipe = tiny(**RECIPES[name])
    profile, memory = simulate(recipe, find_hardware("a100-80gb"), parse_settings(settings))
    return profile, memory.snapshot()


def memory_of(capacity_bytes: int | None = None) -> SimulatedMemory:
    memory = SimulatedMemory(Settings(), capacity_bytes)
    memory.phase = "forward"
    return memory


def born(memory: SimulatedMemory, key: int, size_bytes: int, on_host: bool = False) -> None:
    memory.born(key, size_bytes, on_host, "made", ())


def test_allocated_counts_blocks_and_reserved_counts_segments() -> None:
    memory = memory_of()
    born(memory, 0, 1)  # a block of 512 bytes in a segment of 2 MiB
    born(memory, 1, 3 * MiB + 1)  # 512 more than 3 MiB, in a segment of 20 MiB
    assert memory.allocated_bytes == 512 + 3 * MiB + 512
    assert memory.peak_reserved_bytes == 22 * MiB
    memory.died(1, 3 * MiB + 1, False)
    assert memory.allocated_bytes == 512
    assert memory.peak_bytes == 512 + 3 * MiB + 512
    memory.reset_peak()
    assert (memory.peak_bytes, memory.peak_reserved_bytes) == (512, 22 * MiB)  # the cache stays reserved


def test_a_cache_that_has_to_be_given_back_is_a_surprise() -> None:
    memory = memory_of(100 * MiB)
    for key, size_bytes in enumerate((40 * MiB, 80 * MiB)):  # 80 beside 40 in the cache are too many
        assert not memory.surprises()
        memory.begin_step()
        born(memory, key, size_bytes)
        memory.died(key, size_bytes, False)
    assert "finds no room in a step" in memory.surprises()[0]
    memory.begin_step()
    born(memory, 2, 80 * MiB)  # from the cache
    assert not memory.surprises()


def test_what_lies_in_host_memory_has_no_block() -> None:
    memory = memory_of()
    born(memory, 0, 700, on_host=True)
    assert (memory.allocated_bytes, memory.host_bytes) == (0, 700)
    memory.died(0, 700, True)
    assert (memory.host_bytes, memory.host_peak_bytes) == (0, 700)
    assert memory.snapshot()["segments"] == []


def test_temporaries_count_while_they_are_held() -> None:
    memory = memory_of()
    held = [memory.temporary(size, "kernel", ()) for size in (1024, 2048)]
    assert memory.allocated_bytes == 3072
    memory.release(held)
    assert (memory.allocated_bytes, memory.peak_bytes) == (0, 3072)
    first, second = memory.spans
    assert second.died is not None
    assert first.died is not None
    assert second.died < first.died  # the last one made goes first


def test_out_of_memory_leaves_what_was_there() -> None:
    memory = memory_of(capacity_bytes=24 * MiB)
    born(memory, 0, 3 * MiB)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        born(memory, 1, 30 * MiB)
    assert caught.value.requested_bytes == 30 * MiB
    memory.died(0, 3 * MiB, False)  # what the traceback no longer holds
    assert memory.allocated_bytes == 3 * MiB
    assert len(memory.spans) == 1
    trace = memory.snapshot()["device_traces"][0]
    assert [entry["action"] for entry in trace] == ["segment_alloc", "alloc", "oom", "snapshot"]
    assert trace[2]["device_free"] == 4 * MiB  # 24 less the segment of 20


def test_what_was_there_before_the_recording_is_a_block_and_no_event() -> None:
    memory = memory_of()
    born(memory, 0, 100)
    born(memory, 1, 1000)
    memory.restart()
    memory.died(0, 100, False)
    snapshot = memory.snapshot()
    events = [(entry["action"], entry["size"]) for entry in snapshot["device_traces"][0][:-1]]
    assert events == [("free_requested", 100), ("free_completed", 100)]  # the requested size, as torch has it
    (segment,) = snapshot["segments"]
    assert [(b["requested_size"], b["state"]) for b in segment["blocks"]][1] == (1000, "active_allocated")


def test_after_the_end_nothing_is_recorded() -> None:
    memory = memory_of()
    born(memory, 0, 100)
    memory.ended = True
    memory.died(0, 100, False)
    assert memory.allocated_bytes == 512
    assert memory.spans[0].died is None


@pytest.mark.parametrize("name", RECIPES)
def test_the_snapshots_peak_is_the_reported_one(name: str) -> None:
    profile, snapshot = simulated(name)
    spans = spans_from_trace(snapshot["device_traces"][0], segments=snapshot["segments"])
    peak = find_peak(spans)
    assert peak.allocated_bytes == profile.memory.peak_allocated_bytes
    assert peak.phase == profile.memory.peak_phase
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert reserved == profile.memory.peak_reserved_bytes  # a steady step gives nothing back


@pytest.mark.parametrize("name", RECIPES)
def test_the_snapshot_ends_where_the_step_ends(name: str) -> None:
    profile, snapshot = simulated(name)
    allocated = sum(segment["allocated_size"] for segment in snapshot["segments"])
    at_end = profile.phases["optimizer_step"].allocated_at_end_bytes
    inputs = profile.memory.at_peak.inputs_bytes
    assert at_end is not None
    assert inputs is not None
    # when the step returns, the micro batches go and the loss of each; one more loss than before is made,
    # the step's, and one goes, the step before's
    assert allocated == at_end - inputs - 512 * RECIPES[name].get("gradient_accumulation_steps", 1)
    assert allocated > (profile.memory.at_peak.parameters_bytes or 0)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_blocks_tile_their_segments_and_the_trace_is_in_order(settings: str) -> None:
    _, snapshot = simulated("full", settings)
    validate_snapshot(snapshot)
    for segment in snapshot["segments"]:
        ends = [block["address"] + block["size"] for block in segment["blocks"]]
        starts = [block["address"] for block in segment["blocks"]]
        assert [segment["address"], *ends[:-1]] == starts
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        assert segment["is_expandable"] == bool(settings)
    times = [entry["time_us"] for entry in snapshot["device_traces"][0]]
    assert all(one <= other for one, other in pairwise(times))


@pytest.mark.parametrize("name", RECIPES)
def test_torchs_memory_viz_reads_it(name: str) -> None:
    _, snapshot = simulated(name)
    check_torch_reads(snapshot)


@pytest.mark.parametrize("name", RECIPES)
def test_every_entry_has_a_phase_a_category_and_the_stack_of_the_step(name: str) -> None:
    _, snapshot = simulated(name)
    trace = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    phases = {phase_of(entry["user_metadata"]) for entry in trace}
    assert {"data", "forward", "backward", "optimizer_step"} <= phases
    assert {"inputs", "activations", "temporaries"} <= {entry["category"] for entry in trace}
    for entry in trace:
        files = [frame["filename"] for frame in entry["frames"]]
        assert not [
            f for f in files if re.search(r"harness/(simulat|cuda_|tracker|shape_cache|recording)", f)
        ]
        if phase_of(entry["user_metadata"]) in ("forward", "backward"):
            assert any(f.endswith("harness/training/step.py") for f in files)


def test_a_layers_allocation_has_the_line_of_the_model_that_made_it() -> None:
    _, snapshot = simulated("full")
    places = {
        frame["name"]
        for entry in snapshot["device_traces"][0]
        if entry["action"] == "alloc" and phase_of(entry["user_metadata"]) == "forward"
        for frame in entry["frames"][:1]
    }
    assert "LlamaRMSNorm.forward" in places  # x.pow(2), called by the model itself


def test_profile_names_the_module_of_every_large_allocation_at_the_peak() -> None:
    profile, _ = simulated("lora")
    activations = [allocation for allocation in profile.top if allocation.category == "activations"]
    assert activations
    assert all(allocation.module for allocation in activations)
    assert all(allocation.stack for allocation in activations)


def test_live_spans_from_before_carry_their_category() -> None:
    """Parameters and moments are older than the recorded step: the peak knows them all the same."""
    profile, _ = simulated("full")
    at_peak = profile.memory.at_peak
    parameters = at_peak.parameters_bytes
    assert parameters is not None
    assert at_peak.optimizer_state_bytes is not None
    # AdamW: two moments as large as the parameters that it trains; the buffer inv_freq is not trained
    assert 2 * parameters - at_peak.optimizer_state_bytes in range(0, 2 * 4096)


def test_where_a_repeated_step_runs_out_is_a_moment_of_the_recorded_one() -> None:
    """What was live there is told, and not what lives between two steps."""
    memory = SimulatedMemory(Settings(), 66 * MiB)
    memory.born(1, 10 * MiB, False, "kept", ())
    memory.restart()
    memory.phase = "backward"
    memory.reset_peak()
    for key, size_bytes in ((2, 20 * MiB), (3, 10 * MiB)):
        memory.born(key, size_bytes, False, "made", ())
    for key in (3, 2):
        memory.died(key, 0, False)
    memory.allocator.empty_cache()
    memory.allocator.malloc(30 * MiB)  # another part of the program takes what was free
    with pytest.raises(AllocatorOutOfMemory):
        memory.repeat(1)
    assert [span.size_bytes for span in memory.live_spans()] == [10 * MiB, 20 * MiB]
    assert memory.allocated_bytes == 30 * MiB
    assert memory.phase == "backward"


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_step_on_the_host_takes_nothing_of_the_device(optimizer: str) -> None:
    """Neither do the sums inside the kernels that clip and factor the gradients there."""
    recipe = tiny(offload=["optimizer"], optimizer=optimizer, max_grad_norm=1.0)
    _, memory = simulate(recipe, find_hardware("a100-80gb"))
    trace = [e for e in memory.snapshot()["device_traces"][0] if e["action"] == "alloc"]
    taken = [e["size"] for e in trace if phase_of(e["user_metadata"]) == "optimizer_step"]
    assert taken == [4, 4]  # the sum of the losses, and the step's loss
