"""What follows the steps of a measured run, against the simulation and against sums written out by hand."""

import errno
from pathlib import Path
from typing import Any

import pytest

from harness.answers.one_answer import measured
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.run_folder.run_folder import RunFolder
from harness.simulate.simulated_run import simulate
from harness.step_profile import PHASES, StepProfile, between_steps_in_words, verdict
from harness.training import AfterStep, Evaluation
from tests.support.tiny import tiny

RECIPE = tiny(steps=1, warmup_steps=1)
LORA = tiny(steps=1, warmup_steps=1, adapter="lora")
ROWS, TOKENS, WORDS = 2, 16, 264


def run(folder: Path, after: AfterStep | None, recipe: Any = RECIPE) -> StepProfile:
    return measured(recipe, RunFolder(folder / "run", "tiny", recipe), "cpu", after=after)


def peak(profile: StepProfile, phase: str = "evaluation") -> int:
    return profile.phases[phase].peak_allocated_bytes or 0


def evaluated(folder: Path, **fields: Any) -> StepProfile:
    return run(folder, AfterStep(Evaluation(batch_size=ROWS, **fields)))


@pytest.mark.parametrize("recipe", [RECIPE, LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("how", [{}, {"accumulation_steps": 2}, {"keep_logits": False}], ids=str)
def test_what_is_measured_is_what_was_simulated(recipe: Any, how: dict[str, Any], tmp_path: Path) -> None:
    """All but the device's peaks, which have an allocator there and CUDA's kernels: the logits, what is put
    on the host, the files."""
    after = AfterStep(Evaluation(batches=5, batch_size=ROWS, **how), checkpoint=True)
    ours = run(tmp_path, after, recipe)
    theirs = simulate(recipe, find_hardware("h100"), after=after)[0]
    assert ours.complete
    assert ours.evaluation is not None
    assert ours.evaluation == theirs.evaluation
    assert ours.checkpoint is not None
    assert theirs.checkpoint is not None
    assert ours.checkpoint.weights_bytes == theirs.checkpoint.weights_bytes
    assert ours.checkpoint.optimizer_bytes == theirs.checkpoint.optimizer_bytes
    assert {"evaluation", "saving"} == ours.phases.keys() - {*PHASES}
    assert peak(ours, "saving") == ours.phases["saving"].allocated_at_end_bytes
    assert not list((tmp_path / "run").glob("checkpoint*"))
    assert len(list(between_steps_in_words(ours))) == 2


def test_kept_logits_count_twice_as_the_next_batch_is_joined(tmp_path: Path) -> None:
    """By hand and exact: what is joined, the new batch and the result, beside losses and labels."""
    few, many = evaluated(tmp_path / "few", batches=10), evaluated(tmp_path / "many", batches=30)
    assert peak(many) - peak(few) == 20 * (2 * ROWS * TOKENS * WORDS * 4 + ROWS * (4 + TOKENS * 8))
    bounded = [
        evaluated(tmp_path / str(batches), batches=batches, accumulation_steps=1) for batches in (5, 20)
    ]
    assert peak(bounded[0]) == peak(bounded[1]) < peak(few)


def test_a_step_knows_nothing_of_what_follows(tmp_path: Path) -> None:
    after = AfterStep(Evaluation(batches=20), checkpoint=True)
    alone, followed = (run(tmp_path / name, how) for name, how in (("alone", None), ("followed", after)))
    assert peak(followed) > (followed.memory.peak_allocated_bytes or 0)
    assert followed.memory == alone.memory
    assert followed.step.loss == alone.step.loss
    assert followed.step.model_flops == alone.step.model_flops
    for name in PHASES:
        assert peak(followed, name) == peak(alone, name)
        assert followed.phases[name].flops == alone.phases[name].flops
    assert followed.phases["evaluation"].flops is None  # nobody counted
    assert alone.evaluation is alone.checkpoint is None


def test_the_evaluation_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.training import evaluation

    real, calls = evaluation._predicted, []

    def third_fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 77 bytes.")
        return real(*args)

    monkeypatch.setattr(evaluation, "_predicted", third_fails)
    profile = evaluated(tmp_path, batches=5)
    assert profile.oom is not None
    assert (profile.oom.phase, profile.oom.requested_bytes, profile.oom.advice) == ("evaluation", 77, [])
    logits = ROWS * TOKENS * WORDS * 4
    assert [held.size_bytes for held in profile.oom.top if held.phase == "evaluation"][:1] == [2 * logits]
    assert verdict(profile).startswith("training fits")
    monkeypatch.undo()
    assert profile.memory == evaluated(tmp_path / "well", batches=5).memory


def test_a_full_disk_costs_the_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match=r"No space left on device.*Make room"):
        run(tmp_path, AfterStep(checkpoint=True))
    left = StepProfile.read(tmp_path / "run" / "profile.json")
    assert left.memory.peak_allocated_bytes
    assert left.checkpoint is None
    assert any("No space left" in warning for warning in left.warnings)
