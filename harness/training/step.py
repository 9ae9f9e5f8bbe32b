"""The one training step. Every path (train, measure, simulate) runs this function and no other.

It does not measure, print, synchronize or read a value back: it names its phases to an observer.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.parallel import ALONE, Ranks
from harness.training.batches import Batch


def loss_of_model(model: Any, batch: Batch, num_tokens: Any) -> Tensor:
    """The model's own loss of a micro batch: its part of the mean over the step's `num_tokens`."""
    return model(**batch, num_items_in_batch=num_tokens).loss


class Observer(Protocol):
    """What is told about a run: each phase as it begins and ends."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context around "setup", "data", "forward", "backward" or "optimizer_step"."""
        ...


@dataclass(frozen=True)
class Training:
    """All that a step needs, built once from a recipe by `build_training` (training/model.py)."""

    model: nn.Module
    """As the recipe built it, under its own names."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of the forward pass that decides where autograd keeps what it saves."""
    max_grad_norm: float | None = None
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of the optimizer step: where the memory it makes belongs."""
    summing: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()
    """Context of a micro batch, told whether it is the last: when gradients are summed over ranks."""
    repeats: Callable[[int, int], bool] = lambda n, of: False
    """Whether micro batch `n` of so many, from 1, would only do what the one before it did, as a simulation
    knows: then only its loss is made. Asked before each."""
    ranks: Ranks = ALONE
    called: nn.Module | None = None
    """What the step calls in the model's place: DDP around it."""
    loss: Callable[[Any, Batch, Any], Tensor] = loss_of_model
    """What the task learns by: the loss of a micro batch, from what the step calls as the model."""
    reference: nn.Module | None = None
    """A frozen copy of the model, where the task compares with one."""


def train_step(training: Training, batches: Sequence[Batch], num_tokens: Any, observer: Observer) -> Tensor:
    """One optimizer step over `batches` (the micro batches). Returns the step's loss, a scalar on the device.

    `num_tokens` is the number of predicted tokens in the whole step: every micro batch's loss is its
    sum over tokens divided by it, so k micro batches and one k times larger give the same gradients.
    On several ranks it is theirs together divided by their number, for gradients are averaged over them.
    """
    model, optimizer, scaler = training.called or training.model, training.optimizer, training.scaler
    losses = []
    for n, batch in enumerate(batches, 1):
        if training.repeats(n, len(batches)):
            with observer.phase("forward"):
                losses.append(torch.empty_like(losses[-1]))
            continue
        with training.summing(n == len(batches)):
            with observer.phase("forward"), training.autocast(), training.saved_tensors():
                loss = training.loss(model, batch, num_tokens)
            with observer.phase("backward"):
                (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
        del loss
    with observer.phase("optimizer_step"), training.stepping():
        # of one that steps a copy of the weights (training/toggles/optimizer.py)
        take_gradients = getattr(optimizer, "take_gradients", None)
        if take_gradients is not None:
            take_gradients()
        if scaler is not None and training.max_grad_norm is not None:
            scaler.unscale_(optimizer)
        if training.max_grad_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()
