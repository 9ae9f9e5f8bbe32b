"""An optimizer's state given to one like it, and states refused before the next step fails on them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit, Lion8bit

from harness.training.toggles.optimizer_state import restore_state

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "sgd with momentum, which counts no steps": lambda weights: torch.optim.SGD(
        weights, lr=0.1, momentum=0.9
    ),
    "adafactor": torch.optim.Adafactor,
    "adamw_8bit": AdamW8bit,
    "lion_8bit": lambda weights: Lion8bit(weights, lr=0.1),
}
COUNTING = {name: make for name, make in OPTIMIZERS.items() if name.startswith("adam")}


def weights() -> list[torch.Tensor]:
    """Three weights, the second of which is quantized by 8-bit optimizers."""
    torch.manual_seed(0)
    shapes = ((3, 5), (64, 128), (7,))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def step(optimizer: torch.optim.Optimizer, which: tuple[int, ...]) -> None:
    """One step with gradients for these weights alone."""
    parameters = optimizer.param_groups[0]["params"]
    torch.manual_seed(1)
    for index, weight in enumerate(parameters):
        weight.grad = torch.randn(weight.shape) if index in which else None
    optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("stepped", [(0, 1, 2), (1, 2), (0, 2), ()], ids=str)
def test_a_restored_optimizer_goes_on_as_the_first_would_have(make, stepped):
    """Also where some weights, or all, were never stepped."""
    first = make(weights())
    step(first, stepped)
    again = make([weight.detach().clone().requires_grad_() for weight in first.param_groups[0]["params"]])
    restore_state(again, copy.deepcopy(first.state_dict()))
    for optimizer in (first, again):
        step(optimizer, (0, 1, 2))
    pairs = zip(first.param_groups[0]["params"], again.param_groups[0]["params"], strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def counted(make: Callable[[Any], torch.optim.Optimizer], count: int) -> dict[str, Any]:
    """The saved state of an optimizer whose second weight was stepped so many times."""
    optimizer = make(weights())
    step(optimizer, (0, 1, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    state = saved["state"][1]
    state["step"] = torch.full_like(state["step"], count) if torch.is_tensor(state["step"]) else count
    return saved


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_a_number_of_steps_that_cannot_be_is_refused(make):
    """bitsandbytes' kernels take a step as 32 bit."""
    for impossible in (-1, 2**31, 2**32 - 1):
        with pytest.raises(ValueError, match="optimizer"):
            restore_state(make(weights()), counted(make, impossible))
    restore_state(make(weights()), counted(make, 2**30))
    restore_state(make(weights()), counted(make, 1))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_of_other_weights_is_refused(make):
    optimizer = make(weights())
    step(optimizer, (0, 1, 2))
    saved = optimizer.state_dict()
    with pytest.raises((ValueError, KeyError)):
        restore_state(make(weights()[:2]), copy.deepcopy(saved))
    other = copy.deepcopy(saved)
    other["state"][0] = {name: torch.zeros(2, 2) for name in saved["state"][0]}
    with pytest.raises(ValueError, match="keeps other state"):
        restore_state(make(weights()), other)
