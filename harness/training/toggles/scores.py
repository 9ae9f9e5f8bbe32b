"""The toggles `task: classification`, `reward` and `embedding`, which learn a row as a whole: its class,
which of two rows scores higher, or which rows belong together.

The model is transformers' with a head of `num_labels` outputs in the place of the vocabulary's, which reads
the last token of a row. A pair's loss is written as TRL's RewardTrainer writes it (trl/trainer/
reward_trainer.py, compute_loss). An embedding's has no head, and is that of sentence-transformers
(sentence_transformer/losses/multiple_negatives_ranking.py, its defaults; arXiv 1807.03748), which reads the
two sides of the pairs one after the other.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.recipe import Recipe
from harness.training.toggles.precision import forget_casts

HEADS = ("score", "classifier")
"""What transformers calls the head of scores, and peft trains beside an adapter."""
SHARPNESS = 20.0
"""What cosines are multiplied by (the loss's `scale`): one over the temperature."""


LAST = "last"
"""Of a batch of texts from a file: where the last token of each is, before the padding. int64 (rows,)."""


def prepare_for_scores(recipe: Recipe, model: Any) -> None:
    """Name a token that pads, as the model asks for one with several rows; and take dropout from a model that
    compares, as RewardTrainer does."""
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
    """Have the model find a row's last token before the padding of the data's rows."""
    if recipe.scores and padding is not None:
        model.config.get_text_config().pad_token_id = padding


def loss_of_scores(recipe: Recipe) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: each row, or each pair, counts as much as any other of the step."""

    def loss(called: Any, batch: dict[str, Any], num_tokens: Any) -> Tensor:
        """This micro batch's part of the mean. Of pairs, the first half of the rows is chosen."""
        del num_tokens
        told = called(**batch)
        if recipe.pairs:
            chosen, rejected = told.logits.squeeze(-1).chunk(2)
            mean = -functional.logsigmoid(chosen - rejected).mean()
        else:
            mean = told.loss
        return mean / recipe.gradient_accumulation_steps

    return loss


def loss_of_embeddings(recipe: Recipe) -> Callable[[Any, Any, Any], Tensor]:
    """A loss for Training.loss: each text of the first half of the rows is to be nearest to its own of the
    second half, of all that are in the micro batch."""

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
    """What of `model` makes logits of the last states, or scores."""
    heads = [getattr(model, name, None) for name in HEADS]
    return model.get_output_embeddings() or next((head for head in heads if head is not None), None)


def without_scores(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Those of `names` that are not the head of scores, which no language model's checkpoint has."""
    return [name for name in names if not (recipe.scores and name.partition(".")[0] in HEADS)]
