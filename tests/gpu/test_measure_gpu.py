"""What the CUDA observer says, against PyTorch's own counters on a real GPU: `make gpu`."""

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.measure import Silent, measure
from harness.measure.observer import Unobserved
from harness.recipe import RECORDED_STEPS, Recipe
from harness.run_folder.run_folder import RunFolder
from harness.snapshot.safe_read import read_snapshot
from harness.step_profile.step_profile import StepProfile
from harness.training.loop import run_steps, set_up
from tests.support.memory_viz import check_torch_reads
from tests.support.tiny import tiny

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
MIB = 2**20
FEW: dict[str, Any] = {"warmup_steps": 2, "steps": 5, "seq_len": 128, "micro_batch_size": 8}
RECIPES = {
    "fp32": tiny(**FEW),
    "bf16": tiny(**FEW, precision="bf16"),
    "fp16-mixed": tiny(**FEW, precision="fp16-mixed", max_grad_norm=1.0),
    "lora": tiny(**FEW, precision="bf16", adapter="lora"),
    "checkpointing": tiny(**FEW, precision="bf16", gradient_checkpointing=True),
    "accumulation": tiny(**FEW, precision="bf16", gradient_accumulation_steps=3),
    "nf4": tiny(**FEW, precision="bf16", adapter="lora", quantization="nf4"),
    "optimizer in backward": tiny(**FEW, precision="bf16", optimizer_in_backward=True),
    "offloaded activations": tiny(**FEW, precision="bf16", offload=("activations",)),
    "offloaded optimizer": tiny(**FEW, precision="bf16", offload=("optimizer",)),
}


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measured(recipe: Recipe, folder: Path, *, snapshot: bool = True) -> StepProfile:
    clean()
    return measure(recipe, RunFolder(folder / "run", "tiny", recipe), Silent(), CUDA, snapshot=snapshot)


def bare_peak_bytes(recipe: Recipe) -> int:
    """Peak of the same last steps of the same training with nobody watching, by PyTorch's counter.

    Not of others: what is not split off a block differs from step to step.
    """
    clean()
    training, batches = set_up(recipe, CUDA, Unobserved())
    before = recipe.warmup_steps + recipe.steps
    for _ in run_steps(training, batches, CUDA, ["timed"] * before, Unobserved()):
        pass
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in run_steps(training, batches, CUDA, ["timed"] * RECORDED_STEPS, Unobserved()):
        pass
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_peak_is_that_of_a_bare_loop(recipe, tmp_path):
    bare_peak_bytes(recipe)  # the libraries' workspaces are there from now on
    clean()
    before = torch.cuda.memory_allocated()
    profile = measured(recipe, tmp_path)
    clean()
    assert torch.cuda.memory_allocated() - before <= MIB, "the run left tensors behind"
    assert profile.memory.peak_allocated_bytes == bare_peak_bytes(recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_categories_and_history_agree_with_the_statistics(recipe, tmp_path):
    profile = measured(recipe, tmp_path)
    memory, at_peak = profile.memory, profile.memory.at_peak
    assert memory.kind == "cuda_allocator"
    assert memory.peak_allocated_bytes is not None
    assert memory.peak_reserved_bytes is not None
    assert at_peak.total_bytes() == memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    # 'other' holds the libraries' workspaces and what the allocator did not split off
    assert at_peak.other_bytes is not None
    workspaces = 2 * 32 * MIB
    assert at_peak.other_bytes <= workspaces + 0.05 * memory.peak_allocated_bytes
    assert at_peak.parameters_bytes
    assert at_peak.optimizer_state_bytes or "optimizer" in recipe.offload
    snapshot = read_snapshot(tmp_path / "run" / "snapshot.pickle")
    phases = {entry["user_metadata"].split("phase=")[-1] for entry in snapshot["device_traces"][0]}
    assert {"forward", "backward"} <= phases


def test_the_snapshot_opens(tmp_path):
    measured(RECIPES["bf16"], tmp_path)
    snapshot = pickle.loads((tmp_path / "run" / "snapshot.pickle").read_bytes())
    check_torch_reads(snapshot)


def test_times_driver_and_host(tmp_path):
    profile = measured(RECIPES["bf16"], tmp_path)
    for name in ("data", "forward", "backward", "optimizer_step"):
        time_s = profile.phases[name].time_s
        assert time_s.n == 5
        assert time_s.median is not None
        assert 0 < time_s.median < 10
    step = profile.step.time_s.median
    assert step is not None
    assert sum(profile.phases[name].time_s.median or 0 for name in profile.phases) <= step * 1.2
    assert profile.provenance["driver"] or profile.provenance["nvml_unavailable"]
    assert profile.provenance["compute_capability"]
    assert profile.hardware.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    if profile.memory.process_bytes is not None:
        assert profile.memory.process_bytes >= (profile.memory.peak_reserved_bytes or 0)
        assert profile.memory.cuda_context_bytes is not None
        assert 50 * MIB < profile.memory.cuda_context_bytes < 3000 * MIB


def test_the_kernel_that_sdpa_chose_is_named(tmp_path):
    kernels = measured(RECIPES["bf16"], tmp_path).provenance["attention_kernels"]
    assert len(kernels) == 1
    assert "scaled_dot_product" in kernels[0]
    assert "for_cpu" not in kernels[0]


def test_without_a_snapshot_the_peak_is_the_same(tmp_path):
    with_history = measured(RECIPES["bf16"], tmp_path / "a")
    without = measured(RECIPES["bf16"], tmp_path / "b", snapshot=False)
    assert without.memory.peak_allocated_bytes == with_history.memory.peak_allocated_bytes
    assert without.memory.at_peak.total_bytes() == 0
    assert not (tmp_path / "b" / "run" / "snapshot.pickle").exists()


def test_offload_moves_bytes_to_the_host(tmp_path):
    plain = measured(RECIPES["bf16"], tmp_path / "a").memory
    offloaded = measured(RECIPES["offloaded activations"], tmp_path / "b").memory
    assert offloaded.host_bytes is not None
    assert offloaded.host_bytes > 0
    assert (offloaded.at_peak.activations_bytes or 0) < (plain.at_peak.activations_bytes or 0)


def test_out_of_memory_is_a_profile(tmp_path):
    """Capped to 64 MiB more than nothing; the logits alone are 8 x 16384 x 264 floats."""
    clean()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        profile = measured(tiny(**{**FEW, "seq_len": 16384}), tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not profile.complete
    assert profile.oom is not None
    assert profile.oom.phase in ("forward", "backward")
    assert profile.oom.requested_bytes is not None
    assert profile.oom.requested_bytes > MIB
    assert profile.oom.top
    assert profile.memory.at_peak.activations_bytes
    assert StepProfile.read(tmp_path / "run" / "profile.json") == profile
