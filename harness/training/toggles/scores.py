"""The toggles `task: classification`, `reward` and `embedding`, which learn a row as a whole: its class,
which of two rows scores higher, or which rows belong together.

The first two have transformers' model with a head of scores in place of the language model's head; it reads
the last token of a row. The loss of a pair of rows is that of TRL's RewardTrainer
(trl/trainer/reward_trainer.py, compute_loss). An embedding has a model without a head and the loss of
sentence-transformers (sentence_transformer/losses/multiple_negatives_ranking.py, with its defaults; arXiv
1807.03748), for which the model reads the two sides of the pairs one after the other.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.recipe import Recipe
from harness.training.toggles.precision import forget_casts

HEADS = ("score", "classifier")
"""Names that transformers has for the head of scores, which peft trains in addition to an adapter."""
SHARPNESS = 20.0
"""The factor of cosines (the loss's `scale`), which is one over the temperature."""

LAST = "last"
"""The key in a batch of texts from a file: the places of their last tokens before padding, int64 (rows,)."""


def prepare_for_scores(recipe: Recipe, model: Any) -> None:
    """Set a padding token, which the model requires for several rows; and turn off dropout in a model that
    compares rows, as RewardTrainer does."""
    if not recipe.scores:
        return
    text = model.config.get_text_config()
    if text.pad_token_id is None:
        ends = text.eos_token_id
        text.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
    for module in model.modules() if recipe.pairs else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def pad_alike(recipe: Recipe, model: Any, padding: int | None) -> None:
    """Set the padding token of the data's rows, so that the model finds the last token before it."""
    if recipe.scores and padding is not None:
        model.config.get_text_config().pad_token_id = padding


def loss_of_scores(recipe: Recipe) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: the mean over the step's rows, or pairs of rows."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """This micro batch's part of the mean. Of pairs, the first half of the rows is chosen."""
        del num_tokens
        outputs = called(**batch)
        if recipe.pairs:
            chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
            mean = -functional.logsigmoid(chosen - rejected).mean()
        else:
            mean = outputs.loss
        return mean / recipe.gradient_accumulation_steps

    return loss


def loss_of_embeddings(recipe: Recipe) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: of all texts in the second half of the micro batch's rows, a text of the
    first half is to be nearest to its own."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """This micro batch's part of the mean over the step's pairs."""
        del num_tokens
        sides = []
        ids = batch["input_ids"]
        last = batch[LAST].chunk(2) if LAST in batch else (None, None)
        for read, ends in zip(ids.chunk(2), last, strict=True):
            forget_casts()
            states = called(input_ids=read).last_hidden_state
            sides.append(states[:, -1] if ends is None else states[torch.arange(len(ends)), ends])
        texts, others = (functional.normalize(side, dim=1) for side in sides)
        cosines = texts @ others.T * SHARPNESS
        mean = -(cosines.diagonal() - torch.logsumexp(cosines, dim=1)).mean()
        return mean / recipe.gradient_accumulation_steps

    return loss


def head_of(model: Any) -> nn.Module | None:
    """The module of `model` that makes logits or scores of the last states; None without a head."""
    heads = [getattr(model, name, None) for name in HEADS]
    return model.get_output_embeddings() or next((head for head in heads if head is not None), None)


def without_scores(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Those of `names` that are not of the head of scores, which no checkpoint of a language model has."""
    return [name for name in names if not (recipe.scores and name.partition(".")[0] in HEADS)]
