"""Memory that grows from step to step, found on real tensors and in traces, and only there."""

from typing import Any

import pytest
import torch

from harness.measure import Silent, measure
from harness.measure import measured_run as measuring
from harness.measure.leak import find_leak
from harness.run_folder.run_folder import RunFolder
from harness.snapshot.spans import AllocationSpan
from harness.step_profile import Allocation, LeakReport, StepProfile, leak_in_words
from harness.training.loop import run_steps, set_up
from tests.support.tiny import CPU, tiny

MIB = 2**20
KEPT: list[Any] = []
"""What a program forgets to let go."""


def ran(folder, **fields: Any) -> StepProfile:
    recipe = tiny(warmup_steps=1, steps=2, **fields)
    return measure(recipe, RunFolder(folder / "run", "tiny", recipe), Silent(), CPU)


@pytest.fixture
def hooked(monkeypatch):
    """A function: have `hook(model, args, output)` called after every forward pass."""

    def install(hook: Any) -> None:
        def built(*arguments):
            training, batches = set_up(*arguments)
            training.model.register_forward_hook(hook)
            return training, batches

        monkeypatch.setattr(measuring, "set_up", built)

    yield install
    KEPT.clear()


HEALTHY: dict[str, dict[str, Any]] = {
    "scaler": {"precision": "fp16", "master_weights": True, "gradient_accumulation_steps": 2},
    "int8": {"adapter": "lora", "precision": "bf16", "quantization": "int8", "lora_dropout": 0.1},
    "offload": {"offload": ("activations", "optimizer")},
    "parameters": {"offload": ("parameters",), "gradient_checkpointing": True},
    "experts": {"family": "mixtral", "optimizer": "adamw_8bit"},
}


@pytest.mark.parametrize("fields", HEALTHY.values(), ids=HEALTHY)
def test_a_sound_run_has_none(fields, tmp_path):
    profile = ran(tmp_path, **fields)
    assert profile.leak is None
    assert profile.warnings == []


def test_activations_that_are_kept_are_found(hooked, tmp_path):
    """10,000 floats made in forward and never let go."""
    hooked(lambda model, args, output: KEPT.append(torch.zeros(10_000)))
    profile = ran(tmp_path)
    leak = profile.leak
    assert leak is not None
    assert leak.bytes_per_step == 40_000
    assert leak.by_category == {"activations": 40_000}
    assert leak.largest is not None
    assert (leak.largest.size_bytes, leak.largest.phase) == (40_000, "forward")
    (warning,) = profile.warnings
    assert "39.1 KiB more allocated after each of 2 steps (activations 39.1 KiB)" in warning
    assert "made in forward at tests/measure/test_leak.py" in warning or "measure/test_leak.py" in warning


def test_losses_that_keep_their_graph_are_found(hooked, tmp_path):
    """The classic: a list of losses, each holding on to all that its backward pass needed."""
    hooked(lambda model, args, output: KEPT.append(output.logits.pow(2).sum()))
    leak = ran(tmp_path).leak
    assert leak is not None
    logits, their_sum = 4 * 2 * 16 * 264, 4
    assert leak.by_category == {"activations": logits + their_sum}


def test_memory_that_is_replaced_is_no_leak(hooked, tmp_path):
    def keep(model, args, output) -> None:
        KEPT[:] = [torch.zeros(10_000)]

    hooked(keep)
    assert ran(tmp_path).leak is None


def test_inputs_that_are_kept_are_found(tmp_path, monkeypatch):
    def steps(training, batches, device, kinds, observer, first=0):
        with_inputs = training.model.register_forward_pre_hook(
            lambda model, args, kwargs: KEPT.append(kwargs["input_ids"]), with_kwargs=True
        )
        yield from run_steps(training, batches, device, kinds, observer, first)
        with_inputs.remove()

    monkeypatch.setattr(measuring, "run_steps", steps)
    leak = ran(tmp_path).leak
    KEPT.clear()
    assert leak is not None
    assert leak.by_category == {"inputs": 2 * 16 * 8}


# By counters, as on a GPU ----------------------------------------------------------------------------


def test_every_step_must_end_with_more():
    assert find_leak([10 * MIB, 12 * MIB, 14 * MIB, 16 * MIB], [], []) == LeakReport(
        bytes_per_step=2 * MIB, num_steps=4
    )
    assert find_leak([10, 12, 12, 16], [], []) is None
    assert find_leak([10, 12, 9, 16], [], []) is None
    assert find_leak([10, 10, 10, 10], [], []) is None
    assert find_leak([10, 12], [], []) is None  # by chance
    assert find_leak([], [], []) is None


def test_the_counters_decide_and_the_history_says_what():
    spans = [
        AllocationSpan(1, 100, -1, category="parameters"),
        AllocationSpan(2, 30, 0, birth_phase="forward", died=5, death_phase="backward"),
        AllocationSpan(3, 8, 1, birth_phase="forward"),
        AllocationSpan(4, 8, 7, birth_phase="forward", frames=[{"filename": "a.py", "line": 3, "name": "f"}]),
        AllocationSpan(5, 2, 8, birth_phase="backward", died=9, death_phase="backward"),
    ]
    leak = find_leak([100, 108, 116], spans, [6, 10])
    assert leak is not None
    assert (leak.bytes_per_step, leak.by_category) == (8, {"activations": 8})
    assert leak_in_words(leak) == (
        "memory leak: 8 B more allocated after each of 3 steps (activations 8 B); the largest left "
        "behind: 8 B made in forward at a.py:3 f"
    )
    assert find_leak([100, 100, 100], spans, [6, 10]) is None
    assert find_leak([], spans, [6, 10]) is not None
    assert find_leak([], spans[:3], [6, 10]) is None  # once, not in every step
    assert find_leak([], [spans[0], spans[3]], [6, 10]) is None


def test_words_without_a_history():
    leak = LeakReport(bytes_per_step=3 * MIB, num_steps=5)
    assert leak_in_words(leak) == "memory leak: 3.0 MiB more allocated after each of 5 steps"
    leak.largest = Allocation(size_bytes=MIB, category="other", phase="backward", stack=["torch/x.py:1 f"])
    assert leak_in_words(leak).endswith("the largest left behind: 1.0 MiB made in backward")
