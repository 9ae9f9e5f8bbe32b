"""Resumed runs against uninterrupted ones: the same losses to the last bit, whatever the recipe."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint.checkpoint import read, restore, save
from harness.errors import InputError
from harness.measure.measured_run import measure
from harness.recipe import Recipe, load_recipe
from harness.run_folder.checkpoint_files import checkpoints
from harness.run_folder.run_folder import RunFolder
from harness.step_profile.step_profile import StepProfile
from harness.training import Batches, Training, run_steps
from tests.support.tiny import CPU, NullObserver, built, tiny

LORA = {"adapter": "lora", "lora_dropout": 0.3}
RECIPES: dict[str, dict[str, Any]] = {
    "full, accumulated and clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0},
    "dropout of the model's own": {"family": "gpt2", "gradient_checkpointing": True},
    "lora with dropout": {**LORA, "precision": "bf16"},
    "ia3": {"adapter": "ia3"},
    "fp16 scaler over master weights": {"precision": "fp16", "master_weights": True},
    "fp16 autocast, clipped": {"precision": "fp16-mixed", "max_grad_norm": 0.1},
    "8-bit optimizer": {"optimizer": "adamw_8bit"},
    "8-bit lion over master weights": {"optimizer": "lion_8bit", "precision": "bf16", "master_weights": True},
    "paged optimizer": {"optimizer": "paged_adamw_8bit"},
    "muon": {"optimizer": "muon", "weight_decay": 0.1},
    "schedule free": {"optimizer": "adamw_schedule_free", "weight_decay": 0.1},
    "schedule free, master weights": {
        **{"optimizer": "adamw_schedule_free", "precision": "bf16", "master_weights": True}
    },
    "adafactor": {"optimizer": "adafactor", "weight_decay": 0.1},
    "nf4 base, double quantized": {**LORA, "quantization": "nf4", "double_quant": True, "precision": "bf16"},
    "int8 base": {**LORA, "quantization": "int8", "precision": "bf16"},
    "nf4 experts": {
        **{"family": "mixtral", "quantization": "nf4", "precision": "bf16"},
        **{"adapter": "lora", "lora_targets": ("q_proj", "v_proj")},
    },
    "packing": {"packing": True},
    "optimizer in backward": {"optimizer_in_backward": True, "optimizer": "adamw_8bit"},
    "optimizer on the host": {"offload": ("optimizer",), "precision": "bf16", "master_weights": True},
    "parameters on the host": {"offload": ("parameters",)},
    "activations on the host": {"offload": ("activations",), **LORA},
    "fused optimizer, tied weights": {"family": "gemma2", "attention": "eager", "optimizer_impl": "fused"},
}


def losses(training: Training, batches: Batches, steps: int) -> list[float]:
    done = run_steps(training, batches, CPU, ["timed"] * steps, NullObserver())
    return [step.loss.item() for step in done]


@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(fields, tmp_path):
    recipe = tiny(**fields)
    training, batches = built(recipe)
    before = losses(training, batches, 2)
    path = save(tmp_path / "here", recipe, training, batches, list(before), CPU)
    after = losses(training, batches, 3)
    assert len({*before, *after}) == 5  # every step has data, weights and dropout of its own

    torch.manual_seed(999)  # whatever another process did before
    random.seed(999)
    again, its_batches = built(recipe)
    restore(read(path, recipe), recipe, again, its_batches, CPU)
    assert losses(again, its_batches, 3) == after
    # and what comes after is the same too: weights, optimizer state, random numbers
    ends = [
        save(tmp_path / name, recipe, each, data, [*before, *after], CPU)
        for name, each, data in (("a", training, batches), ("b", again, its_batches))
    ]
    names = {file.name for file in ends[0].iterdir()} - {"manifest.json", "state.json"}
    assert len(names) == 4
    for name in names:
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name


class Quiet:
    """Progress that says nothing and stops the run, as Ctrl-C does, after so many steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after

    def step(self, index, total, kind, loss, tokens_per_s, peak_bytes) -> None:
        if index + 1 == self.stop_after:
            raise KeyboardInterrupt


def ran(recipe: Recipe, folder: Path, stop_after: int | None = None) -> StepProfile:
    return measure(recipe, RunFolder(folder, "tiny", recipe), Quiet(stop_after), CPU)


def resumed(recipe: Recipe, folder: Path, out: Path | None = None) -> StepProfile:
    return measure(recipe, RunFolder(out, "tiny", recipe, folder), Quiet(), CPU)


SIX = tiny(**LORA, warmup_steps=1, steps=3, checkpoint_every=2)
"""Steps: one to warm up, three timed, two recorded; checkpoints after 2, 4 and 6."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The folder of a run that was stopped after three steps."""
    folder = tmp_path_factory.mktemp("resume") / "stopped"
    assert not ran(SIX, folder, stop_after=3).complete
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> StepProfile:
    return ran(SIX, tmp_path_factory.mktemp("resume") / "whole")


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the same folder", "in another folder"])
def test_a_run_goes_on_after_its_checkpoint(elsewhere, stopped, whole, tmp_path):
    folder = Path(shutil.copytree(stopped, tmp_path / "stopped"))
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')  # the power failed
    out = tmp_path / "out" if elsewhere else folder
    again = resumed(SIX, folder, out if elsewhere else None)
    assert again.complete
    assert again.step.loss == whole.step.loss
    assert [line["step"] for line in log_of(out)] == list(range(6))
    assert [line["loss"] for line in log_of(out)] == whole.step.loss
    # steps 3 and 4 were to be timed; the process has to be warm first
    assert [line["kind"] for line in log_of(out)][2:] == ["warmup", "timed", "recorded", "recorded"]
    assert again.step.time_s.n == 1
    assert again.provenance["resumed_after_steps"] == 2
    assert again.memory.peak_allocated_bytes == whole.memory.peak_allocated_bytes
    assert again.memory.at_peak == whole.memory.at_peak
    assert again.memory.first_step_peak_allocated_bytes is None
    assert [path.name for path in checkpoints(out / "checkpoints")] == ["step-4", "step-6"]
    assert StepProfile.read(out / "profile.json") == again


@pytest.mark.parametrize("line", ["[]", '{"step": Infinity}', '{"step": "x"}', "[" * 100_000, "step 1"])
def test_a_log_that_is_none_is_named(line, stopped, tmp_path):
    folder = Path(shutil.copytree(stopped, tmp_path / "stopped"))
    with (folder / "log.jsonl").open("a") as log:
        log.write(f"{line}\n")
    with pytest.raises(InputError, match=r"stopped/log\.jsonl has a line that is not about a step"):
        resumed(SIX, folder)


def test_a_finished_run_goes_on_with_more_steps(stopped, tmp_path):
    folder = Path(shutil.copytree(stopped, tmp_path / "stopped"))
    fewer = SIX.model_copy(update={"steps": 1, "warmup_steps": 0, "checkpoint_every": 1})
    resumed(fewer, folder)
    with pytest.raises(InputError, match="all 3 steps of the run are done"):
        resumed(fewer, folder)
    more = resumed(fewer.model_copy(update={"steps": 4}), folder)
    assert len(more.step.loss or []) == 6
    assert load_recipe(str(folder / "recipe.yaml"))[1].steps == 4
