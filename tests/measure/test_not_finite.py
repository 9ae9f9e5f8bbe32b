"""Losses that are nan or infinite: the run stops and says where, or goes on and says how often."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cli.exit_status import NOT_FINITE
from harness.cli.running.run import _status
from harness.measure import measure
from harness.measure import measured_run as measuring
from harness.recipe.recipe import Recipe
from harness.run_folder.run_folder import RunFolder
from harness.step_profile.step_profile import StepProfile
from harness.sweep.cell import answer
from harness.training.loop import run_steps, set_up
from tests.support.tiny import CPU, NullObserver, tiny

SIX: dict[str, Any] = {"warmup_steps": 1, "steps": 3}


class Told:
    """Progress that remembers the losses it was told."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, index, total, kind, loss, tokens_per_s, peak_bytes) -> None:
        self.losses.append(loss)


def ran(recipe: Recipe, folder: Path) -> tuple[StepProfile, list[dict[str, Any]]]:
    profile = measure(recipe, RunFolder(folder / "run", "tiny", recipe), Told(), CPU)
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert StepProfile.read(folder / "run" / "profile.json") == profile  # null and all
    return profile, lines


@pytest.fixture
def poisoned(monkeypatch):
    """A function: from step `at` on, what the loss is divided by is replaced by `value`."""

    def poison(at: int, value: float, until: int = 1000) -> None:
        def built(*arguments):
            training, batches = set_up(*arguments)
            forward, calls = training.model.forward, [0]

            def wrong(*args: Any, num_items_in_batch: Any, **kwargs: Any) -> Any:
                step, calls[0] = calls[0], calls[0] + 1
                divisor = torch.tensor(value) if at <= step < until else num_items_in_batch
                return forward(*args, num_items_in_batch=divisor, **kwargs)

            training.model.forward = wrong
            return training, batches

        monkeypatch.setattr(measuring, "set_up", built)

    return poison


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (0.0, "inf"), (-0.0, "-inf")])
def test_a_loss_that_is_not_finite_stops_the_run(value, shown, poisoned, tmp_path, capsys):
    poisoned(3, value)
    profile, lines = ran(tiny(**SIX, checkpoint_every=2), tmp_path)
    found = profile.not_finite
    assert found is not None
    assert (found.step, found.phase, found.value, found.num_steps) == (3, "forward", shown, 1)
    assert found.checkpoint == str(tmp_path / "run" / "checkpoints" / "step-2")
    assert (found.origin, found.weights) == (None, [])  # the update has written nan everywhere
    assert not profile.complete
    assert (profile.step.loss or [])[3:] == [None]
    assert [line["loss"] is None for line in lines] == [False, False, False, True]
    assert lines[-1]["not_finite"] == shown
    assert profile.step.time_s.n == 3
    assert _status(profile, tiny(**SIX)) == NOT_FINITE == 4
    said = capsys.readouterr().err
    assert f"stopped: the loss is {shown}, in forward of step 4 of 6" in said
    assert "step-2" in said
    assert "With checkpoint_every=1 they are looked at after every step." in said


def test_without_a_checkpoint_it_says_so(poisoned, tmp_path, capsys):
    poisoned(0, math.nan)
    profile, _ = ran(tiny(**SIX), tmp_path)
    assert profile.not_finite is not None
    assert profile.not_finite.checkpoint is None
    _status(profile, tiny(**SIX))
    assert "none (recipe: checkpoint_every)" in capsys.readouterr().err


def test_on_a_device_that_computes_nothing_no_loss_stops_a_run(poisoned, tmp_path, monkeypatch):
    """DPO's and KTO's loss of zeros is nan."""
    emulated = property(lambda run: True, lambda run, value: None)
    monkeypatch.setattr(measuring.MeasuredRun, "emulated", emulated, raising=False)
    poisoned(0, math.nan)
    profile, lines = ran(tiny(**SIX), tmp_path)
    assert (profile.complete, profile.not_finite, profile.source) == (True, None, "emulated")
    assert len(lines) == 6


def test_a_run_that_goes_on_counts_them(poisoned, tmp_path):
    """The scaler finds the gradients infinite and leaves the weights as they are, so the loss recovers."""
    poisoned(1, math.nan, until=3)
    recipe = tiny(**SIX, precision="fp16-mixed", on_nan="continue", checkpoint_every=1)
    profile, lines = ran(recipe, tmp_path)
    assert profile.complete
    assert profile.not_finite is not None
    assert (profile.not_finite.step, profile.not_finite.num_steps) == (1, 2)
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False, False]
    assert _status(profile, tiny(**SIX)) == 0
    # and what GradScaler made of it: halved twice, from 65536
    assert [line["loss_scale"] for line in lines] == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14]
    # no checkpoint was written of the steps that went wrong
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-5",
        "step-6",
    ]


def test_a_scale_that_grows_is_in_the_log(tmp_path, monkeypatch):
    """torch doubles it after 2000 good steps; here after 2."""

    def built(*arguments):
        training, batches = set_up(*arguments)
        training.scaler.set_growth_interval(2)
        return training, batches

    monkeypatch.setattr(measuring, "set_up", built)
    _, lines = ran(tiny(**SIX, precision="fp16-mixed"), tmp_path)
    assert [line["loss_scale"] for line in lines] == [2.0**16, 2.0**17, 2.0**17, 2.0**18, 2.0**18, 2.0**19]


def test_weights_that_are_not_finite_are_found_when_a_checkpoint_is_due(tmp_path, monkeypatch, capsys):
    """The loss of the step was fine; its update was not."""

    def steps(training, batches, device, kinds, observer, first=0):
        for step in run_steps(training, batches, device, kinds, observer, first):
            if step.index == 3:
                with torch.no_grad():
                    next(training.model.parameters()).view(-1)[0] = torch.nan
            yield step

    monkeypatch.setattr(measuring, "run_steps", steps)
    profile, _ = ran(tiny(**SIX, checkpoint_every=2), tmp_path)
    found = profile.not_finite
    assert found is not None
    assert (found.step, found.phase, found.value) == (3, "optimizer_step", "not finite")
    assert str(found.checkpoint).endswith("step-2")
    assert not profile.complete
    assert _status(profile, tiny(**SIX)) == NOT_FINITE
    assert "a weight is nan or infinite, in optimizer_step" in capsys.readouterr().err


def test_the_last_good_checkpoint_can_be_resumed(poisoned, tmp_path, monkeypatch):
    poisoned(3, math.nan)
    recipe = tiny(**SIX, checkpoint_every=2)
    ran(recipe, tmp_path)
    monkeypatch.undo()
    folder = RunFolder(None, "tiny", recipe, tmp_path / "run")
    profile = measure(recipe, folder, Told(), CPU)
    assert profile.complete
    training, batches = set_up(recipe, CPU, NullObserver())
    done = run_steps(training, batches, CPU, ["timed"] * 6, NullObserver())
    assert profile.step.loss == [float(step.loss) for step in done]
    assert profile.not_finite is None


def test_a_cell_of_a_sweep_says_why():
    """A learning rate of 100,000 in fp16: the first update is the end of the weights."""
    recipe = tiny(**SIX, precision="fp16", learning_rate=1e5)
    outcome = answer("measured", recipe, None, "cpu")
    assert (outcome.status, outcome.reason) == ("failed", "stopped: the loss is nan, in forward of step 2")


# Where it came from -------------------------------------------------------------------------------


def origin(recipe: Recipe, folder: Path) -> tuple[int, str, str | None, list[str], str]:
    """Of a run that goes wrong: the step and phase it was seen in, what made it, the weights, the words."""
    found = ran(recipe, folder)[0].not_finite
    assert found is not None
    return found.step, found.phase, found.origin, found.weights, found.origin_in_words()


@pytest.fixture
def broken(monkeypatch):
    """A function: `do` is done to the training before its step `at` begins (0: right after setup)."""

    def break_(at: int, do: Any) -> None:
        def built(*arguments):
            training, batches = set_up(*arguments)
            take = type(batches).__next__

            class Counted:
                steps = 0

                def __next__(self):
                    if self.steps == at:
                        do(training)
                    self.steps += 1
                    return take(batches)

                def __getattr__(self, name):
                    return getattr(batches, name)

            return training, Counted()

        monkeypatch.setattr(measuring, "set_up", built)

    return break_


@torch.no_grad()
def spoil(training: Any, *, frozen: bool = False) -> None:
    """Make an element of the last weight of a kind infinite."""
    [*_, last] = (p for p in training.model.parameters() if p.requires_grad is not frozen)
    last.view(-1)[-1] = torch.inf


def test_a_checkpoint_from_right_before_shows_that_the_forward_pass_made_it(poisoned, tmp_path):
    poisoned(3, math.nan)
    step, phase, made_in, weights, words = origin(tiny(**SIX, checkpoint_every=1), tmp_path)
    assert (step, phase, made_in, weights) == (3, "forward", "forward", [])
    assert words == "The weights were finite before that step: its forward pass made it."


def test_an_update_that_was_skipped_shows_that_the_forward_pass_made_it(poisoned, tmp_path):
    poisoned(3, math.nan)
    assert origin(tiny(**SIX, precision="fp16-mixed"), tmp_path)[2:4] == ("forward", [])


def test_an_infinite_loss_with_finite_gradients(broken, tmp_path):
    """The loss alone is infinite, so that the update leaves finite weights: they were finite before."""

    def wrong(training: Any) -> None:
        forward = training.model.forward

        def infinite(**batch: Any) -> Any:
            output = forward(**batch)
            output.loss = output.loss + torch.inf
            return output

        training.model.forward = infinite

    broken(3, wrong)
    assert origin(tiny(**SIX), tmp_path)[:4] == (3, "forward", "forward", [])


def test_weights_that_were_not_finite_before_the_first_step(broken, tmp_path):
    broken(0, spoil)
    *seen, weights, words = origin(tiny(**SIX, precision="fp16-mixed"), tmp_path)
    assert seen == [0, "forward", "setup"]
    assert words == f"{weights[0]} was not finite before the first step."
    assert len(weights) == 1


def test_frozen_weights_that_are_not_finite(broken, tmp_path):
    """The update has written nan over every weight that is trained; the frozen ones still tell."""
    broken(0, lambda training: spoil(training, frozen=True))
    *seen, weights, _ = origin(tiny(**SIX, adapter="lora"), tmp_path)
    assert seen == [0, "forward", "setup"]
    assert len(weights) == 1
    assert "lora" not in weights[0]


def test_an_earlier_update_that_left_no_finite_weight(tmp_path):
    """A learning rate of 100,000 in fp16, whose gradients the scaler has seen to be finite."""
    recipe = tiny(**SIX, precision="fp16", learning_rate=1e5)
    *seen, weights, words = origin(recipe, tmp_path)
    assert seen == [1, "forward", "optimizer_step"]
    assert 1 < len(weights) <= 10
    assert words == f"The optimizer made it, out of finite gradients, in {weights[0]}."


@pytest.mark.parametrize("changes", [{}, {"master_weights": True, "precision": "bf16"}])
def test_a_gradient_that_was_not_finite(changes, broken, tmp_path):
    """Seen in the weights when a checkpoint is due, and in the moments that the optimizer keeps."""

    def wrong(training: Any) -> None:
        [*_, last] = training.model.parameters()
        last.register_hook(lambda gradient: gradient * torch.nan)

    broken(3, wrong)
    *seen, weights, words = origin(tiny(**SIX, **changes, checkpoint_every=4), tmp_path)
    assert seen == [3, "optimizer_step", "backward"]
    assert len(weights) == 1
    assert words == f"A gradient of {weights[0]} was not finite: the optimizer's state of it is not either."


def test_an_update_that_was_not_finite(tmp_path, monkeypatch):
    """The weight is not finite, and the moments are: the gradients were."""

    def steps(training, batches, device, kinds, observer, first=0):
        for step in run_steps(training, batches, device, kinds, observer, first):
            spoil(training)
            yield step

    monkeypatch.setattr(measuring, "run_steps", steps)
    for optimizer, expected in (("adamw", "optimizer_step"), ("adamw_8bit", None), ("sgd", None)):
        recipe = tiny(**SIX, optimizer=optimizer, checkpoint_every=1)
        *seen, weights, words = origin(recipe, tmp_path / optimizer)
        assert seen == [0, "optimizer_step", expected]
        assert len(weights) == 1
        assert ("no moments" in words) is (expected is None)
