"""Muon: momentum that is made orthogonal, on the matrices within the model; AdamW on all else."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.training.toggles.optimizer_state import Build, OfOthers, restore_state
from harness.training.toggles.scores import head_of


def muon_and_adamw(model: nn.Module, learning_rate: float, weight_decay: float, adamw: Build) -> "Together":
    """torch's Muon over the hidden matrices of `model` that are trained, and `adamw` over its other weights.

    Muon's step is scaled as in arXiv 2502.16982, section 2.2, so that the learning rate is AdamW's.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = head_of(model)
    head = getattr(head, "modules_to_save", head)  # peft's copy of a head, which is trained as a whole
    outer |= (
        {id(weight) for weight in head.parameters()} if head is not None and not _adapted(head) else set()
    )
    hidden = [weight for weight in trained if weight.ndim == 2 and id(weight) not in outer]
    rest = [weight for weight in trained if weight.ndim != 2 or id(weight) in outer]
    each: list[torch.optim.Optimizer] = [adamw(rest)] if rest else []
    if hidden:
        each.append(
            torch.optim.Muon(
                hidden, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return Together(each)


def _adapted(head: nn.Module) -> bool:
    """Whether what is trained of the head is an adapter."""
    return any(not weight.requires_grad for weight in head.parameters())


class Together(OfOthers):
    """Several optimizers, each over weights of its own, stepped one after the other."""

    def __init__(self, each: Sequence[torch.optim.Optimizer]) -> None:
        self._each = list(each)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each."""
        for optimizer in self._each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free every gradient."""
        for optimizer in self._each:
            optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of each."""
        return [group for optimizer in self._each for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of every weight."""
        return {weight: state for optimizer in self._each for weight, state in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer."""
        return {"each": [optimizer.state_dict() for optimizer in self._each]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, saved in zip(self._each, state_dict["each"], strict=True):
            restore_state(optimizer, saved)
