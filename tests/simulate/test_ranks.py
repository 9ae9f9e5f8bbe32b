"""One rank of many, simulated alone, by PyTorch's own engines on shape-only tensors.

Against what they allocate on CUDA: tests/simulate/test_recorded_traces.py, the recordings called ranks-*.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import _sharding_prop as propagation

from harness.allocator import parse_settings
from harness.errors import InputError
from harness.hardware.hardware import Calibration, find_hardware, with_memory
from harness.simulate import SimulatedMemory, simulate, simulate_for_devices
from harness.simulate import device as simulated_device
from harness.simulate.cuda.divided_lists import on_local_parts
from harness.snapshot.attribution import breakdown_at
from harness.step_profile import StepProfile, TimeStats
from harness.system import TorchRelease
from tests.support.long import but_for
from tests.support.releases import keeps_workspaces
from tests.support.tiny import MODELS, tiny

H100 = find_hardware("h100")
DIVIDES_INTEGERS = TorchRelease.of(torch.__version__).fsdp_divides_integers
FAST_HOST = Calibration(host_op_s=1e-9)
"""A tiny model's kernels are so short that nothing else than the host is ever waited for."""
MARKS = "_propagate_use_strided_shard_flag"
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": "fsdp", "dp_shard": 2},
    "ddp": {"parallel": "ddp", "dp_replicate": 2},
    "tp": {"parallel": "tp", "tp": 2},
    "fsdp+tp": {"parallel": "fsdp+tp", "dp_shard": 2, "tp": 2},
}


def simulated(rank: int = 0, **fields: Any) -> tuple[StepProfile, SimulatedMemory]:
    return simulate(tiny(**fields), H100, rank=rank)


@functools.cache
def one_of(engine: str) -> tuple[StepProfile, SimulatedMemory]:
    """The first rank of an engine."""
    return simulated(**ENGINES[engine])


def peak(rank: int = 0, **fields: Any) -> int:
    found = simulated(rank, **fields)[0].memory.peak_allocated_bytes
    assert found is not None
    return found


@pytest.mark.parametrize("fields", ENGINES.values(), ids=ENGINES)
def test_a_rank_is_simulated_without_the_others(fields: dict[str, Any]) -> None:
    profile, _ = simulate(tiny(**fields), replace(H100, calibration=FAST_HOST), rank=1)
    assert profile.complete
    assert profile.provenance["rank"] == 1
    assert not [warning for warning in profile.warnings if "nobody has looked at" in warning]
    assert sum(stats.communication_s or 0 for stats in profile.phases.values()) > 0
    assert not torch.distributed.is_initialized()
    assert not hasattr(torch, "meta")


def in_blocks(*elements: int) -> int:
    """Bytes of fp32 tensors in blocks of 512."""
    return sum(-(-4 * count // 512) * 512 for count in elements)


BLOCK = (64 * 64, 32 * 64, 32 * 64, 64 * 64, 128 * 64, 128 * 64, 64 * 128, 64, 64)
"""Elements of the tiny Llama's weights: q, k, v, o, gate, up, down, and two norms."""
OWN = in_blocks(264 * 64, 264 * 64, 64)
"""Embeddings, head and last norm, which stay with the model."""


@pytest.mark.parametrize(
    ("fields", "gathered"),
    [
        # in the second block's backward: it, and the first one's all-gather ahead
        ({}, OWN + in_blocks(*BLOCK) + in_blocks(sum(BLOCK))),
        # at the end of forward: both blocks, and the output of the last all-gather
        ({"reshard_after_forward": False}, OWN + 2 * in_blocks(*BLOCK) + in_blocks(sum(BLOCK))),
    ],
    ids=["resharded", "kept"],
)
def test_gathered_weights_are_a_category_of_their_own(fields: dict[str, Any], gathered: int) -> None:
    profile, memory = simulated(parallel="fsdp", dp_shard=2, **fields)
    assert profile.memory.at_peak.gathered_parameters_bytes == gathered
    assert profile.memory.at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    of_category = [entry for entry in profile.top if entry.category == "gathered_parameters"]
    assert sum(entry.size_bytes for entry in of_category) <= gathered
    end = breakdown_at(memory.spans, memory.last_event)
    assert end.gathered_parameters_bytes == 0  # after the step there are parts only


@keeps_workspaces
def test_whole_weights_are_gathered_ones_where_memory_runs_out_within_a_unit() -> None:
    """They are the model's parameters at that moment; what rests is the same with any memory."""
    recipe = tiny(parallel="fsdp", dp_shard=2, micro_batch_size=8)
    fits = simulate(recipe, H100)[0].memory
    assert fits.process_bytes is not None
    short = simulate(recipe, with_memory(H100, fits.process_bytes - 2**20))[0]
    assert short.oom is not None
    assert short.memory.at_peak.parameters_bytes == fits.at_peak.parameters_bytes
    assert short.memory.at_peak.gathered_parameters_bytes


@pytest.mark.parametrize("engine", ["ddp", "tp"])
def test_other_engines_gather_no_weights(engine: str) -> None:
    assert one_of(engine)[0].memory.at_peak.gathered_parameters_bytes == 0


NF4 = {"adapter": "lora", "adapter_dtype": "base", "quantization": "nf4", "double_quant": True}


@pytest.mark.skipif(DIVIDES_INTEGERS, reason="since PyTorch 2.12 FSDP2 divides weights of integers")
def test_experts_in_4_bit_need_a_pytorch_that_divides_them() -> None:
    fields = {"family": "mixtral", "precision": "bf16", **ENGINES["fsdp"], **NF4, "lora_targets": ["q_proj"]}
    with pytest.raises(InputError, match=r"divides no weights of integers.*Install PyTorch 2\.12"):
        simulated(**fields)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param(
            "mixtral",
            marks=pytest.mark.skipif(
                not DIVIDES_INTEGERS, reason="before PyTorch 2.12 FSDP2 divides no weights of integers"
            ),
        ),
    ],
)
def test_divided_weights_in_4_bit_are_not_called_left_in_16_bit(family: str) -> None:
    """FSDP stores them as 16-bit numbers."""
    fields = {"family": family, "precision": "bf16", **ENGINES["fsdp"], **NF4, "lora_targets": ["q_proj"]}
    warnings = simulated(**fields)[0].warnings
    assert not [warning for warning in warnings if "as they were" in warning]


def test_no_rank_needs_more_than_the_first() -> None:
    """264 words and 64 columns among 5 ranks: the last has 52 and 12 where the first has 53 and 13."""
    fields = {"parallel": "fsdp", "dp_shard": 5}
    first, last = peak(0, **fields), peak(4, **fields)
    assert last < first
    assert peak(1, **fields) == first


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"--rank 2: the recipe has ranks 0 to 1\. Set"):
        simulated(rank=2, parallel="fsdp", dp_shard=2)
    with pytest.raises(InputError, match=r"--rank 1: the recipe has rank 0 alone"):
        simulated(rank=1)


def test_a_rank_of_a_run_does_not_simulate_another() -> None:
    """Within a process group there cannot be a second one of all."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(InputError, match="a rank of a run cannot simulate another"):
            simulated(parallel="fsdp", dp_shard=2)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fields", [ENGINES["fsdp"], ENGINES["ddp"]], ids=["fsdp", "ddp"])
def test_devices_that_run_the_same_kernels_wait_for_their_own_links(fields: dict[str, Any]) -> None:
    """One simulation times the rank on both, as one on each does."""
    recipe = tiny(**fields)
    devices = [replace(find_hardware(name), calibration=FAST_HOST) for name in ("rtx-4090", "l4")]
    times = simulate_for_devices(recipe, devices, parse_settings("", torch.__version__))[2]
    for device in devices:
        profile = simulate(recipe, device)[0]
        waits = {name: phase.communication_s for name, phase in profile.phases.items()}
        found = {name: times[device.name].communication_s.get(name, 0.0) for name in waits}
        assert found == pytest.approx(waits, rel=1e-9)
        assert times[device.name].step.tokens_per_s == pytest.approx(profile.step.tokens_per_s, rel=1e-9)
        assert sum(found.values()) > 0


def test_a_sum_that_nobody_waits_for_is_lost_in_every_step() -> None:
    """The recomputed block stops within the down projection, when its base's sum has begun."""
    fields = ENGINES["tp"] | {"adapter": "lora", "gradient_checkpointing": True, "precision": "bf16"}
    few, many = (simulated(steps=steps, **fields)[0] for steps in (2, 7))
    assert any("every step loses" in warning for warning in many.warnings)
    grown = (many.memory.peak_allocated_bytes or 0) - (few.memory.peak_allocated_bytes or 0)
    recipe = tiny(**fields)
    assert grown > 0
    assert grown % (5 * recipe.micro_batch_size * recipe.seq_len) == 0
    assert not any("every step loses" in warning for warning in one_of("tp")[0].warnings)


def test_parts_in_host_memory_are_not_on_the_gpu() -> None:
    """A rank's part of weights, gradients and moments is in host memory, and is stepped there."""
    there = one_of("fsdp")[0].memory
    host = simulated(**ENGINES["fsdp"], cpu_offload=True)[0].memory
    assert (host.at_peak.optimizer_state_bytes, there.host_bytes) == (0, None)
    assert (host.at_peak.parameters_bytes or 0) < (there.at_peak.parameters_bytes or 0) / 10
    assert (host.host_bytes or 0) >= (there.at_peak.optimizer_state_bytes or 0) * 2


@pytest.mark.skipif(not hasattr(propagation, MARKS), reason="PyTorch 2.11 marks no strided parts")
@pytest.mark.parametrize(("engine", "strided"), [("fsdp", False), ("fsdp+tp", True)])
def test_strided_parts_are_looked_for_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, strided: bool
) -> None:
    """PyTorch looks through a whole list of weights once for each: most of the time of a large model."""
    looked, propagate = [], getattr(propagation, MARKS)
    monkeypatch.setattr(
        propagation, MARKS, functools.wraps(propagate)(lambda *a: (looked.append(a), propagate(*a)))
    )
    config = json.loads((MODELS / "llama.json").read_text()) | {"hidden_size": 96}
    (tmp_path / "model.json").write_text(json.dumps(config))  # no other test's: PyTorch keeps what it found
    simulated(model=str(tmp_path / "model.json"), **ENGINES[engine])
    assert bool(looked) == strided


STEPPED: dict[str, dict[str, Any]] = {
    "adamw": {},
    "clipped": {"max_grad_norm": 1.0},
    "foreach sgd": {"optimizer": "sgd"},
    "lora": {"adapter": "lora"},
    "uneven": {"dp_shard": 7},
    "hybrid": {"dp_replicate": 2},
    "with tp": {"parallel": "fsdp+tp", "tp": 2},
}


@pytest.mark.parametrize("fields", but_for(("clipped", "lora", "with tp"), STEPPED))
def test_lists_of_divided_weights_take_what_dtensor_plans_for_them(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own planning is the oracle: every request of the step, and the device's time, is the same. Of
    the host's, planning is left out."""
    asked = {"parallel": "fsdp", "dp_shard": 2, **fields}
    taken: list[bool] = []

    def seen(*call: Any) -> Any:
        found = on_local_parts(*call)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(simulated_device, "on_local_parts", seen)
    ours, memory = simulated(**asked)
    assert any(taken)
    monkeypatch.setattr(simulated_device, "on_local_parts", lambda *call: None)
    planned, other = simulated(**asked)
    assert memory.log.events == other.log.events
    assert ours.memory == planned.memory
    for phase in (*ours.phases.values(), *planned.phases.values()):
        phase.time_s = TimeStats()
    assert ours.phases == planned.phases
