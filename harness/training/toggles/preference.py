"""The toggles `task: dpo`, `kto`, `orpo` and `grpo`: the loss of a micro batch of pairs, of good and bad
answers, or of answers with rewards, from log-probabilities that TRL computes.

The losses are those of TRL's trainers with their defaults (trl/trainer/dpo_trainer.py, kto_trainer.py and
grpo_trainer.py, _compute_loss, loss_type sigmoid, kto and dapo). TRL's head never holds all logits
(trl/kernels/chunked_logprob.py); what it computes for a log lives until the loss is computed. orpo's trainer
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
"""By task: what TRL's trainer computes of each token, for the loss and for its log."""
CLIPPED = 0.2
"""The ratio of a token's probability to that it was drawn with is clipped to 1 +- this (epsilon)."""
REFERENCE = ("chosen", "rejected")
"""Keys in a batch: the reference's log-probabilities; for kto, of the answers and the mismatched ones."""
OF_REFERENCE = "reference_log_probs"
"""The key in a batch of answers with rewards: what the reference says of each token but a row's first."""
MISMATCHED = "mismatched_"
"""The beginning of keys in a batch whose answers are to other prompts. They serve to estimate how far the
model has departed from its reference (arXiv 2402.01306, section 4.1)."""

GOOD = "good"
"""The key in a batch of marked answers from a file: how many of them are good. These come first."""


def reference_of(recipe: Recipe, model: Any) -> Any:
    """The frozen copy of `model` that the loss compares it with; None for a recipe without one."""
    if not recipe.copies_reference:
        return None
    reference = deepcopy(model).requires_grad_(False)
    return reference.eval()


def give_trl_head(recipe: Recipe, model: Any, reference: Any) -> None:
    """Give both models TRL's head, if the loss needs it; and where answers are compared, turn off dropout in
    both, since they are to differ by their weights alone."""
    trl = import_trl(recipe)
    if recipe.prefers or recipe.by_odds:
        trl.disable_dropout_in_model(model)
    if recipe.by_trl:
        trl.add_fused_lm_head(without_adapter(model), outputs=LOGGED[recipe.task])
    if reference is not None:
        trl.disable_dropout_in_model(reference)
        trl.add_fused_lm_head(reference)


def loss_of_pairs(recipe: Recipe, model: Any, reference: Any) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: the mean over the step's pairs, or over its marked answers."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """This micro batch's part of the mean. The first half of its rows is chosen, or good, and the second
        rejected, or bad."""
        del num_tokens  # each pair, or row, counts as much as any other
        with torch.no_grad():
            mismatched = _by_row(_outputs(called, batch, MISMATCHED), batch) if recipe.unpaired else None
        forget_casts()
        outputs = _outputs(called, batch)
        answers = _by_row(outputs, batch)
        reference_outputs = None  # lives, as in TRL, until the loss is computed
        if not recipe.computes_reference:
            references = [batch[name] for name in REFERENCE]
        else:
            off = nullcontext() if reference is not None else model.disable_adapter()
            compared = reference if reference is not None else model
            with torch.no_grad(), off:
                others = _by_row(_outputs(compared, batch, MISMATCHED), batch) if recipe.unpaired else None
                reference_outputs = _outputs(compared, batch)
            theirs = _by_row(reference_outputs, batch)
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
    odds_ratio_loss; arXiv 2403.07691). It holds all rows' logits, and a copy of the chosen rows'."""
    trl = import_trl(recipe)

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """This micro batch's part of the mean over the step's pairs. Chosen rows' prompts are learned too."""
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
    """log(1 - p) for a log-probability log(p), computed without cancellation for p below and above a half."""
    small = torch.log1p(-torch.exp(log_prob))
    return torch.where(log_prob < -math.log(2), small, torch.log(-torch.expm1(log_prob)))


def loss_of_rewards(recipe: Recipe) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: the mean over the step's tokens."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """This micro batch's part of the mean. The model as it is now has drawn the answers, so their
        probabilities are those they were drawn with."""
        outputs = _outputs(called, batch)
        log_probs = outputs.log_probs[:, -(batch["labels"].shape[1] - 1) :]
        ratio = torch.exp(log_probs - log_probs.detach())
        departed = None
        if recipe.regularized:
            reference = batch[OF_REFERENCE]
            departed = torch.exp(reference - log_probs) - (reference - log_probs) - 1
            departed = departed * ratio  # 1, but for its gradient (arXiv 2512.02556)
        clipped = torch.clamp(ratio, 1 - CLIPPED, 1 + CLIPPED)
        advantages = batch["advantages"].unsqueeze(1)
        each = -torch.min(ratio * advantages, clipped * advantages)
        if departed is not None:
            each = each + recipe.grpo_beta * departed
        learned = (batch["labels"][:, 1:] != NOT_PREDICTED).to(each.dtype)
        return (each * learned).sum() / torch.as_tensor(num_tokens).clamp(min=1)

    return loss


def _outputs(called: Any, batch: dict[str, Any], prefix: str = "") -> Any:
    """The outputs of the model with TRL's head for the input_ids and labels of `batch` with this prefix."""
    inputs = {name: batch[prefix + name] for name in ("input_ids", "labels")}
    return called(**inputs, use_cache=False, fused_lm_head=True)


def _by_row(outputs: Any, batch: dict[str, Any]) -> Tensor:
    """The log-probability of each row's answer (rows,), without the tokens that peft's prompts add."""
    return outputs.log_probs[:, -(batch["labels"].shape[1] - 1) :].sum(dim=1)


def import_trl(recipe: Recipe) -> Any:
    """TRL's module with the functions for log-probabilities; None if `recipe` needs none. Raises
    MissingDependency."""
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
