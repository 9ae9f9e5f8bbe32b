"""The toggle `task: dpo`: the loss of a micro batch of pairs, by the log-probabilities that TRL computes.

Written as TRL's DPOTrainer writes it (trl/trainer/dpo_trainer.py, _compute_loss, loss_type sigmoid): TRL's
head never holds the logits (trl/kernels/chunked_logprob.py), and what it notes for a log it keeps until the
loss is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.errors import MissingDependency
from harness.recipe import Recipe

LOGGED = ("log_probs", "entropy", "mean_logits", "is_top1")
"""What DPOTrainer has computed of each token, for its log."""
REFERENCE = ("chosen", "rejected")


def reference_of(recipe: Recipe, model: Any) -> Any:
    """The frozen copy of `model` that it is compared with; None where there is none."""
    if not recipe.copies_reference:
        return None
    reference = deepcopy(model).requires_grad_(False)
    return reference.eval()


def prepare_for_pairs(recipe: Recipe, model: Any, reference: Any) -> None:
    """Give both TRL's head, and take dropout from them: they are to differ by their weights alone."""
    if not recipe.prefers:
        return
    trl = import_trl(recipe)
    trl.disable_dropout_in_model(model)
    trl.add_fused_lm_head(
        model.get_base_model() if hasattr(model, "get_base_model") else model, outputs=LOGGED
    )
    if reference is not None:
        trl.disable_dropout_in_model(reference)
        trl.add_fused_lm_head(reference)


def loss_of_pairs(recipe: Recipe, model: Any, reference: Any) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: of what the step calls in the place of `model`."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """The part of the mean over the step's pairs that is this micro batch's, the first half of whose rows
        is chosen and the second rejected."""
        del num_tokens  # each pair counts as much as any other
        given = {name: batch[name] for name in ("input_ids", "labels")}
        told = called(**given, use_cache=False, fused_lm_head=True)
        chosen, rejected = _by_row(told, given["labels"])
        if recipe.computes_reference:
            off = nullcontext() if reference is not None else model.disable_adapter()
            with torch.no_grad(), off:
                asked = (reference if reference is not None else model)(
                    **given, use_cache=False, fused_lm_head=True
                )
            references = _by_row(asked, given["labels"])
        else:
            references = tuple(batch[name] for name in REFERENCE)
        ahead = (chosen - references[0]) - (rejected - references[1])
        per_pair = -functional.logsigmoid(recipe.dpo_beta * ahead)
        return per_pair.mean() / recipe.gradient_accumulation_steps

    return loss


def _by_row(told: Any, labels: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities of the answers, chosen and rejected. peft's prompts stand before the row's tokens."""
    return told.log_probs[:, -(labels.shape[1] - 1) :].sum(dim=1).chunk(2, dim=0)


def import_trl(recipe: Recipe) -> Any:
    """What of TRL computes log-probabilities, if `recipe` needs it."""
    if not recipe.prefers:
        return None
    try:
        from trl.trainer import utils
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "trl":
            raise
        raise MissingDependency("trl", "dpo", f"task: {recipe.task}") from None
    return utils
