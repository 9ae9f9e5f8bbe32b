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
    """An object that hears each phase of a run begin and end."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context around "setup", "data", "forward", "backward" or "optimizer_step"."""
        ...


@dataclass(frozen=True)
class Training:
    """All that a step needs. `build_training` (training/model.py) builds it once from a recipe."""

    model: nn.Module
    """The model as the recipe built it, with its parameters under their own names."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of a forward pass, which decides where autograd keeps what it saves."""
    max_grad_norm: float | None = None
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of the optimizer step, which decides whether tensors made in it count as host memory."""
    summing: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()
    """(whether it is the last) -> the context of a micro batch, which decides whether its gradients are
    summed over ranks."""
    repeats: Callable[[int, int], bool] = lambda n, of: False
    """(n, number of micro batches) -> whether micro batch `n`, from 1, would only do again what the one
    before did. A simulation knows that, and only the micro batch's loss is made then. Called before each."""
    ranks: Ranks = ALONE
    called: nn.Module | None = None
    """The module that the step calls in the model's place: DDP around the model. None: the model."""
    loss: Callable[[Any, Batch, Any], Tensor] = loss_of_model
    """(the module that the step calls, a micro batch, the step's number of tokens) -> the task's loss."""
    reference: nn.Module | None = None
    """A frozen copy of the model, for a task that compares with one."""


def train_step(training: Training, batches: Sequence[Batch], num_tokens: Any, observer: Observer) -> Tensor:
    """One optimizer step over `batches` (the micro batches). Returns the step's loss, a scalar on the device.

    `num_tokens` is the number of predicted tokens in the whole step. The loss of a micro batch is its sum
    over tokens divided by this number, so k micro batches and one that is k times larger have the same
    gradients. On several ranks it is the number of all ranks' tokens divided by that of ranks, since
    gradients are averaged over ranks.
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
        # an optimizer that steps a copy of the weights has this (training/toggles/stepped_copy.py)
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
