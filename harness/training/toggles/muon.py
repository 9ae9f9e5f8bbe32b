"""The toggle `optimizer: muon`: torch's Muon, which makes momentum orthogonal, steps the matrices within the
model, and AdamW steps all other weights."""

import torch
from torch import nn

from harness.training.toggles.optimizer_state import Build, Together
from harness.training.toggles.scores import head_of


def muon_and_adamw(model: nn.Module, learning_rate: float, weight_decay: float, adamw: Build) -> Together:
    """torch's Muon over the trained hidden matrices of `model`, and `adamw` over its other trained weights.

    Muon's step is scaled as in arXiv 2502.16982, section 2.2, so that the learning rate is AdamW's.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = head_of(model)
    head = getattr(head, "modules_to_save", head)  # peft's copy of a head that is trained as a whole
    outer |= (
        {id(weight) for weight in head.parameters()} if head is not None and not _adapted(head) else set()
    )
    hidden = [weight for weight in trained if weight.ndim == 2 and id(weight) not in outer]
    rest = [weight for weight in trained if weight.ndim != 2 or id(weight) in outer]
    optimizers: list[torch.optim.Optimizer] = [adamw(rest)] if rest else []
    if hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return Together(optimizers)


def _adapted(head: nn.Module) -> bool:
    """Whether the head has frozen weights, so that only an adapter of it is trained."""
    return any(not weight.requires_grad for weight in head.parameters())
