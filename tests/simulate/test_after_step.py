"""What follows the steps, simulated: an evaluation that keeps logits, a checkpoint.

That its peaks are those of transformers' own code on PyTorch's CUDA build: virtual_gpu/test_evaluation.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.allocator.settings import parse_settings
from harness.answers.one_answer import simulated as with_other_ways
from harness.hardware.hardware import find_hardware, with_memory
from harness.recipe.file import load_recipe
from harness.report import read_run, section_of
from harness.run_folder.run_folder import RunFolder
from harness.simulate.simulated_run import simulate
from harness.step_profile import (
    PHASES,
    CheckpointStats,
    StepProfile,
    between_steps_in_words,
    explain_oom,
    verdict,
)
from harness.training import AfterStep, Evaluation, run_steps, save_as_trainer
from tests.support.tiny import CPU, NullObserver, built, tiny

H100 = find_hardware("h100")
MiB = 2**20
RECIPE = tiny(seq_len=512, precision="bf16")
LOGITS = 8 * 512 * 264 * 2
"""Of one batch: rows, tokens, words, bytes of bfloat16."""


def evaluated(recipe=RECIPE, hardware=H100, **fields) -> StepProfile:
    return simulate(recipe, hardware, after=AfterStep(Evaluation(**fields)))[0]


def peak(profile: StepProfile, phase: str = "evaluation") -> int:
    return profile.phases[phase].peak_allocated_bytes or 0


def test_a_step_knows_nothing_of_what_follows() -> None:
    alone, after = (
        simulate(RECIPE, H100, after=how)[0] for how in (None, AfterStep(Evaluation(batches=2), True))
    )
    assert (alone.memory, alone.step, alone.top) == (after.memory, after.step, after.top)
    assert alone.phases == {name: after.phases[name] for name in PHASES}
    assert after.phases.keys() == {*PHASES, "evaluation", "saving"}
    assert alone.evaluation is alone.checkpoint is None


def test_accumulation_bounds_the_device_and_not_the_host() -> None:
    few, many = (evaluated(batches=n, accumulation_steps=1) for n in (5, 10))
    assert peak(few) == peak(many)
    assert many.evaluation is not None
    # by hand: 9 batches in fp32, the tenth, and the ten joined
    assert many.evaluation.host_bytes == pytest.approx(2 * 10 * 2 * LOGITS, rel=0.02)
    alone = evaluated(batches=10, keep_logits=False)
    assert peak(alone) - peak(many) < MiB  # blocks
    assert alone.evaluation is not None
    assert alone.evaluation.logits_bytes is None
    assert (alone.evaluation.host_bytes or 0) < 1024


def test_under_autocast_logits_are_kept_in_fp32() -> None:
    mixed = evaluated(RECIPE.model_copy(update={"precision": "bf16-mixed"}), batches=3).evaluation
    assert mixed is not None
    assert (mixed.logits_bytes, mixed.logits_dtype) == (3 * 2 * LOGITS, "float32")


def test_training_fits_and_the_evaluation_does_not() -> None:
    step = evaluated(batches=1, batch_size=1)
    needed = (step.memory.peak_reserved_bytes or 0) + (step.memory.cuda_context_bytes or 0)
    small = with_memory(H100, needed + 60 * MiB)
    after = AfterStep(Evaluation(batches=40))
    profile = with_other_ways("evaluated", RECIPE, small, parse_settings(""), folder=None, after=after)
    assert profile.oom is not None
    assert profile.oom.phase == "evaluation"
    assert profile.oom.advice == []  # that is for training, which fits
    alone = simulate(RECIPE, small)[0]
    assert alone.oom is None
    assert profile.memory.at_peak == alone.memory.at_peak
    assert profile.memory.peak_reserved_bytes == alone.memory.peak_reserved_bytes
    assert profile.step.time_s.median
    assert profile.evaluation is not None
    ways = [(way.accumulation_steps, way.keeps_logits, way.fits) for way in profile.evaluation.instead]
    assert ways == [(1, True, True), (None, False, True)]
    assert profile.evaluation.logits_bytes == 40 * LOGITS
    words = verdict(profile)
    assert words.startswith("training fits on h100")
    assert (
        "the evaluation does not: 82.5 MiB of logits; eval_accumulation_steps 1 brings its peak to" in words
    )
    assert "out of memory in evaluation" in explain_oom(profile)
    assert "memory runs out" in next(iter(between_steps_in_words(profile)))


@pytest.mark.parametrize("fields", [{}, {"adapter": "lora"}, {"adapter": "ia3"}], ids=str)
def test_a_checkpoint_writes_what_the_library_writes(fields: dict[str, str], tmp_path: Path) -> None:
    recipe = tiny(**fields)
    profile, _ = simulate(recipe, H100, after=AfterStep(checkpoint=True))
    training, batches = built(recipe)
    for _ in run_steps(training, batches, CPU, ["warmup"], NullObserver()):
        pass
    save_as_trainer(recipe, training, tmp_path, NullObserver())
    (path,) = tmp_path.glob("*.safetensors")
    found = profile.checkpoint
    assert found is not None
    assert found.weights_bytes == sum(tensor.nbytes for tensor in load_file(path).values())
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    assert found.optimizer_bytes == sum(t.nbytes for kept in state.values() for t in kept.values())
    assert found.host_bytes == found.weights_bytes  # more than any one state
    # nothing is copied on the device
    assert peak(profile, "saving") == profile.phases["saving"].allocated_at_end_bytes


def saved(rank: int = 0, *, whole: bool = False, **fields: Any) -> tuple[CheckpointStats, int]:
    """What `rank` writes, and how much more than before is allocated at the peak."""
    after = AfterStep(checkpoint=True, whole_state=whole)
    profile, _ = simulate(tiny(**fields), H100, rank=rank, after=after)
    assert profile.checkpoint is not None
    return profile.checkpoint, peak(profile, "saving") - (
        profile.phases["saving"].allocated_at_end_bytes or 0
    )


def test_ranks_write_their_parts_or_rank_0_the_whole() -> None:
    alone, _ = saved()
    divided: dict[str, Any] = {"parallel": "fsdp", "dp_shard": 4}
    parts = [saved(rank, **divided) for rank in range(4)]
    assert sum(part.weights_bytes or 0 for part, _ in parts) == alone.weights_bytes
    assert [more for _, more in parts] == [0] * 4  # nothing is copied on the device
    (whole, more), (other, as_much) = (saved(rank, whole=True, **divided) for rank in (0, 3))
    assert (whole.weights_bytes, other.weights_bytes, other.optimizer_bytes) == (alone.weights_bytes, 0, 0)
    assert whole.optimizer_bytes == alone.optimizer_bytes
    # one gathered tensor at a time, on every rank: the largest has 264 words of 64 channels of 4 bytes
    assert more == as_much == 264 * 64 * 4
    # rank 0 has all weights in its host's memory, and then all of the state but what was there: a count each
    largest = max(alone.weights_bytes or 0, alone.optimizer_bytes or 0)
    assert (whole.host_bytes or 0) <= largest < (whole.host_bytes or 0) + 1024
    assert other.host_bytes == 0


def test_ddp_writes_on_rank_0_what_one_process_writes() -> None:
    alone, (first, _), (second, _) = (
        saved()[0],
        *(saved(rank, parallel="ddp", dp_replicate=2) for rank in (0, 1)),
    )
    assert first == alone
    assert second.weights_bytes == second.optimizer_bytes == second.host_bytes == 0


def test_what_is_on_the_host_is_not_copied_there() -> None:
    recipe = tiny(precision="bf16", offload=["parameters"])
    found = simulate(recipe, H100, after=AfterStep(checkpoint=True))[0].checkpoint
    assert found is not None
    assert found.weights_bytes
    assert found.host_bytes == 0


def test_the_snapshot_of_a_repeated_step_is_plain_numbers(tmp_path: Path) -> None:
    """Its blocks are those that the logged requests made, some of whose sizes know the rule of a kernel."""
    recipe = load_recipe("smoke")[1]
    _, memory = simulate(recipe, H100, after=AfterStep(Evaluation(batches=1)))
    RunFolder(tmp_path / "run", "smoke", recipe).write_snapshot(memory.snapshot())
    blocks = [block for each in memory.snapshot()["segments"] for block in each["blocks"]]
    assert {type(block["requested_size"]) for block in blocks} == {int}


def test_the_report_shows_it(tmp_path: Path) -> None:
    """The timeline goes on to the end of the checkpoint, where the most is allocated."""
    profile, memory = simulate(RECIPE, H100, after=AfterStep(Evaluation(batches=30), True))
    assert peak(profile) > (profile.memory.peak_allocated_bytes or 0)
    folder = RunFolder(tmp_path / "run", "tiny", RECIPE)
    folder.write_snapshot(memory.snapshot())
    folder.write_profile(profile)
    run = read_run(tmp_path / "run")
    assert run.history is not None
    assert run.history.phases[-1].phase == "evaluation"  # a checkpoint makes nothing on the device
    # a trace has requests, the profile blocks
    assert 0 <= peak(profile) - run.history.peak()[1] < 2 * MiB
    section = section_of(run)
    assert not any("do not fit the recording" in line for line in section.missing)
    assert any(line.startswith("Evaluation of 30 batches") for line in section.answer)
    assert {"evaluation", "saving"} <= section.data["phases"].keys()
