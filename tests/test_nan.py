"""Losses that are nan or infinite: the run stops and says where, or goes on and says how often."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import measure as measuring
from harness.cli import NOT_FINITE, _status
from harness.loop import run_steps, set_up
from harness.measure import measure
from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step_profile import StepProfile
from harness.sweep_cell import answer
from tests.tiny import CPU, NullObserver, tiny

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
    assert not profile.complete
    assert (profile.step.loss or [])[3:] == [None]
    assert [line["loss"] is None for line in lines] == [False, False, False, True]
    assert lines[-1]["not_finite"] == shown
    assert profile.step.time_s.n == 3
    assert _status(profile, 6) == NOT_FINITE == 4
    said = capsys.readouterr().err
    assert f"stopped: the loss is {shown}, in forward of step 4 of 6" in said
    assert "step-2" in said


def test_without_a_checkpoint_it_says_so(poisoned, tmp_path, capsys):
    poisoned(0, math.nan)
    profile, _ = ran(tiny(**SIX), tmp_path)
    assert profile.not_finite is not None
    assert profile.not_finite.checkpoint is None
    _status(profile, 6)
    assert "none (recipe: checkpoint_every)" in capsys.readouterr().err


def test_a_run_that_goes_on_counts_them(poisoned, tmp_path):
    """The scaler finds the gradients infinite and leaves the weights as they are, so the loss recovers."""
    poisoned(1, math.nan, until=3)
    recipe = tiny(**SIX, precision="fp16-mixed", on_nan="continue", checkpoint_every=1)
    profile, lines = ran(recipe, tmp_path)
    assert profile.complete
    assert profile.not_finite is not None
    assert (profile.not_finite.step, profile.not_finite.num_steps) == (1, 2)
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False, False]
    assert _status(profile, 6) == 0
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
    assert _status(profile, 6) == NOT_FINITE
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
