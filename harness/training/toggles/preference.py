"""The toggles `task: dpo` and `task: kto`: the loss of a micro batch of pairs, or of good and bad answers, by
the log-probabilities that TRL computes.

Written as TRL's trainers write it (trl/trainer/dpo_trainer.py and kto_trainer.py, _compute_loss, loss_type
sigmoid and kto): TRL's head never holds the logits (trl/kernels/chunked_logprob.py), and what it notes for a
log it keeps until the loss is there.
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
"""What DPOTrainer has computed of each token, for its log; KTOTrainer all but the last."""
SFT_LOGGED = ("log_probs", "entropy", "is_top1")
"""And SFTTrainer."""
REFERENCE = ("chosen", "rejected")
"""Of a batch, the reference's log-probabilities; with kto of the answers, and of the mismatched ones."""
MISMATCHED = "mismatched_"
"""What precedes a name of the batch where the answers are those of other prompts: how far the model has gone
from its reference is estimated by them (arXiv 2402.01306, section 4.1)."""


def reference_of(recipe: Recipe, model: Any) -> Any:
    """The frozen copy of `model` that it is compared with; None where there is none."""
    if not recipe.copies_reference:
        return None
    reference = deepcopy(model).requires_grad_(False)
    return reference.eval()


def give_trl_s_head(recipe: Recipe, model: Any, reference: Any) -> None:
    """Give both TRL's head; and where they are compared take dropout from them, for they are to differ by
    their weights alone."""
    if not recipe.by_trl:
        return
    trl = import_trl(recipe)
    logged = SFT_LOGGED if recipe.writes else LOGGED[:3] if recipe.unpaired else LOGGED
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    trl.add_fused_lm_head(base, outputs=logged)
    if recipe.prefers:
        trl.disable_dropout_in_model(model)
    if reference is not None:
        trl.disable_dropout_in_model(reference)
        trl.add_fused_lm_head(reference)


def loss_of_pairs(recipe: Recipe, model: Any, reference: Any) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: of what the step calls in the place of `model`."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """The part of the mean over the step's pairs, or rows, that is this micro batch's, the first half of
        whose rows is chosen and the second rejected."""
        del num_tokens  # each pair, or row, counts as much as any other
        with torch.no_grad():
            mismatched = _by_row(_told(called, batch, MISMATCHED), batch) if recipe.unpaired else None
        # accelerate enters autocast anew for every pass, and what is computed again makes its casts itself
        torch.clear_autocast_cache()
        told = _told(called, batch)
        answers = _by_row(told, batch)
        asked = None
        if not recipe.computes_reference:
            references = [batch[name] for name in REFERENCE]
        else:
            off = nullcontext() if reference is not None else model.disable_adapter()
            asks = reference if reference is not None else model
            with torch.no_grad(), off:
                others = _by_row(_told(asks, batch, MISMATCHED), batch) if recipe.unpaired else None
                asked = _told(asks, batch)
            theirs = _by_row(asked, batch)
            references = [*theirs.chunk(2)] if others is None else [theirs, others]
        if mismatched is None:
            chosen, rejected = answers.chunk(2)
            ahead = (chosen - references[0]) - (rejected - references[1])
            each = -functional.logsigmoid(recipe.dpo_beta * ahead)
        else:
            departed = (mismatched - references[1]).mean().clamp(min=0)
            ahead, half = answers - references[0], -(-len(answers) // 2)
            good = 1 - functional.sigmoid(recipe.dpo_beta * (ahead[:half] - departed))
            bad = 1 - functional.sigmoid(recipe.dpo_beta * (departed - ahead[half:]))
            each = torch.cat((good, bad))
        return each.mean() / recipe.gradient_accumulation_steps

    return loss


def _told(called: Any, batch: dict[str, Any], prefix: str = "") -> Any:
    given = {name: batch[prefix + name] for name in ("input_ids", "labels")}
    return called(**given, use_cache=False, fused_lm_head=True)


def _by_row(told: Any, batch: dict[str, Any]) -> Tensor:
    """Log-probabilities of the answers. peft's prompts stand before the row's tokens."""
    return told.log_probs[:, -(batch["labels"].shape[1] - 1) :].sum(dim=1)


def import_trl(recipe: Recipe) -> Any:
    """What of TRL computes log-probabilities, if `recipe` needs it."""
    if not recipe.by_trl:
        return None
    try:
        from trl.trainer import utils
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "trl":
            raise
        line = "loss: fused_lm_head" if recipe.writes else f"task: {recipe.task}"
        raise MissingDependency("trl", "dpo", line) from None
    return utils
