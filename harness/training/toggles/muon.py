"""Muon: momentum that is made orthogonal, on the matrices within the model; AdamW on all else."""

import torch
from torch import nn

from harness.training.toggles.optimizer_state import Build, Together
from harness.training.toggles.scores import head_of


def muon_and_adamw(model: nn.Module, learning_rate: float, weight_decay: float, adamw: Build) -> Together:
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
