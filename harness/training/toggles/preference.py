"""The toggles `task: dpo`, `kto`, `orpo` and `grpo`: the loss of a micro batch of pairs, of good and bad
answers, or of answers with rewards, by the log-probabilities that TRL computes.

Written as TRL's trainers write it (trl/trainer/dpo_trainer.py, kto_trainer.py and grpo_trainer.py,
_compute_loss, loss_type sigmoid, kto and dapo, their defaults): TRL's head never holds the logits
(trl/kernels/chunked_logprob.py), and what it notes for a log it keeps until the loss is there. orpo's trainer
has no such head.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.data import NOT_PREDICTED
from harness.errors import MissingDependency
from harness.parallel import without_adapter
from harness.recipe import Recipe
from harness.training.toggles.precision import forget_casts

LOGGED = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
    "grpo": ("log_probs", "entropy"),
}
"""By task: what TRL's trainer has computed of each token, for its log."""
CLIPPED = 0.2
"""How far from 1 the ratio of a token's probabilities to those it was drawn by may be (epsilon)."""
REFERENCE = ("chosen", "rejected")
"""Of a batch, the reference's log-probabilities; with kto of the answers, and of the mismatched ones."""
MISMATCHED = "mismatched_"
"""What precedes a name of the batch where the answers are those of other prompts: how far the model has gone
from its reference is estimated by them (arXiv 2402.01306, section 4.1)."""


GOOD = "good"
"""Of a batch of marked answers from a file: how many of them are good. They come first."""


def reference_of(recipe: Recipe, model: Any) -> Any:
    """The frozen copy of `model` that it is compared with; None where there is none."""
    if not recipe.copies_reference:
        return None
    reference = deepcopy(model).requires_grad_(False)
    return reference.eval()


def give_trl_head(recipe: Recipe, model: Any, reference: Any) -> None:
    """Give both TRL's head; and where answers are compared take dropout from them, for they are to differ by
    their weights alone."""
    trl = import_trl(recipe)
    if recipe.prefers or recipe.by_odds:
        trl.disable_dropout_in_model(model)
    if recipe.by_trl:
        trl.add_fused_lm_head(without_adapter(model), outputs=LOGGED[recipe.task])
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
        forget_casts()
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
            ahead, half = answers - references[0], batch.get(GOOD, -(-len(answers) // 2))
            good = 1 - functional.sigmoid(recipe.dpo_beta * (ahead[:half] - departed))
            bad = 1 - functional.sigmoid(recipe.dpo_beta * (departed - ahead[half:]))
            each = torch.cat((good, bad))
        return each.mean() / recipe.gradient_accumulation_steps

    return loss


def loss_of_odds(recipe: Recipe) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss (trl/experimental/orpo/orpo_trainer.py, concatenated_forward and
    odds_ratio_loss; arXiv 2403.07691): the logits of all rows are there, and of the chosen a copy."""
    trl = import_trl(recipe)

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """The part of the mean over the step's pairs that is this micro batch's. Of the chosen, the prompt is
        learned too."""
        del num_tokens
        ids, half = batch["input_ids"], len(batch["input_ids"]) // 2
        logits = called(input_ids=ids, use_cache=False).logits
        written = logits[:half, :-1].contiguous()
        nll = functional.cross_entropy(written.view(-1, written.shape[-1]), ids[:half, 1:].reshape(-1))
        labels = batch["labels"][:, 1:]
        learned = labels != NOT_PREDICTED
        each = trl.selective_log_softmax(logits[:, :-1], torch.where(learned, labels, 0))
        mean = ((each * learned).sum(-1) / learned.sum(-1)).float()
        chosen, rejected = mean.chunk(2)
        ahead = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
        whole = nll - (recipe.dpo_beta * functional.logsigmoid(ahead)).mean()
        return whole / recipe.gradient_accumulation_steps

    return loss


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """log(1 - p), without cancellation on either side of a half."""
    small = torch.log1p(-torch.exp(log_prob))
    return torch.where(log_prob < -math.log(2), small, torch.log(-torch.expm1(log_prob)))


def loss_of_rewards(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
    """A loss for Training.loss: this micro batch's part of the mean over the step's tokens. The answers are
    the model's own as it is now, so the probabilities they were drawn by are these."""
    told = _told(called, batch)
    log_probs = told.log_probs[:, -(batch["labels"].shape[1] - 1) :]
    ratio = torch.exp(log_probs - log_probs.detach())
    clipped = torch.clamp(ratio, 1 - CLIPPED, 1 + CLIPPED)
    advantages = batch["advantages"].unsqueeze(1)
    each = -torch.min(ratio * advantages, clipped * advantages)
    learned = (batch["labels"][:, 1:] != NOT_PREDICTED).to(each.dtype)
    return (each * learned).sum() / torch.as_tensor(num_tokens).clamp(min=1)


def _told(called: Any, batch: dict[str, Any], prefix: str = "") -> Any:
    given = {name: batch[prefix + name] for name in ("input_ids", "labels")}
    return called(**given, use_cache=False, fused_lm_head=True)


def _by_row(told: Any, batch: dict[str, Any]) -> Tensor:
    """Log-probabilities of the answers. peft's prompts stand before the row's tokens."""
    return told.log_probs[:, -(batch["labels"].shape[1] - 1) :].sum(dim=1)


def import_trl(recipe: Recipe) -> Any:
    """What of TRL computes log-probabilities, if `recipe` needs it."""
    if not (recipe.by_trl or recipe.by_odds):
        return None
    try:
        from trl.trainer import utils
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "trl":
            raise
        line = "loss: fused_lm_head" if recipe.writes else f"task: {recipe.task}"
        raise MissingDependency("trl", "dpo", line) from None
    return utils
