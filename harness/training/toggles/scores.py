"""The toggles `task: classification` and `task: reward`: a row's class, or which of two rows scores higher.

The model is transformers' with a head of `num_labels` outputs in the place of the vocabulary's, which reads
the last token of a row. A pair's loss is written as TRL's RewardTrainer writes it (trl/trainer/
reward_trainer.py, compute_loss).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from harness.recipe import Recipe

HEADS = ("score", "classifier")
"""What transformers calls the head of scores, and peft trains beside an adapter."""


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


def head_of(model: Any) -> nn.Module | None:
    """What of `model` makes logits of the last states, or scores."""
    heads = [getattr(model, name, None) for name in HEADS]
    return model.get_output_embeddings() or next((head for head in heads if head is not None), None)


def without_scores(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Those of `names` that are not the head of scores, which no language model's checkpoint has."""
    return [name for name in names if not (recipe.scores and name.partition(".")[0] in HEADS)]
