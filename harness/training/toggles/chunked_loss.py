"""The toggles `loss: linear_cross_entropy` and `loss: fused_lm_head`: losses without all the logits, by
PyTorch and by TRL.

PyTorch's takes the last states and the head's weight (torch.nn.functional.linear_cross_entropy, with options:
in chunks, and with the gradients of both made in forward). TRL's is what its SFTTrainer trains with
(trl/trainer/sft_trainer.py, compute_loss), by the head of toggles/preference.py.
"""

import inspect
import re
from collections.abc import Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.data import NOT_PREDICTED
from harness.parallel import without_adapter
from harness.recipe import Recipe
from harness.training.toggles import Problem

_LOGITS_ALONE = ["logits = self.lm_head(hidden_states)"]


def chunk_loss(recipe: Recipe, model: Any) -> None:
    """Have the model's forward, given labels, compute the loss from the last states and no logits: in
    training, or where it is told to skip them, as Liger's models do it."""
    if not recipe.chunked_loss:
        return
    base = without_adapter(model)
    plain = base.forward

    @wraps(type(base).forward)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **more: Any) -> Any:
        if more.get("labels") is None or not (self.training if skip_logits is None else skip_logits):
            return plain(*args, **more)
        from transformers.modeling_outputs import CausalLMOutput

        labels, num_tokens = more.pop("labels"), more.pop("num_items_in_batch")
        states = self.base_model(*args, **more).last_hidden_state
        return CausalLMOutput(loss=_loss(states, self.get_output_embeddings(), labels, num_tokens))

    base.forward = MethodType(forward, base)


def _loss(states: Tensor, head: Any, labels: Tensor, num_tokens: Any) -> Tensor:
    following = functional.pad(labels, (0, 1), value=NOT_PREDICTED)[..., 1:].reshape(-1)
    # as weights of the words, not divided by afterwards: the loss has the dtype of the states, in 16 bit too
    # narrow for a sum, and in whose numbers the gradients would be divided
    share = torch.as_tensor(1 / num_tokens, dtype=torch.float32).to(states.device).expand(len(head.weight))
    return functional.linear_cross_entropy(
        states.flatten(0, -2),
        head.weight,
        following,
        linear_bias=head.bias,
        weight=share,
        reduction="sum",
        options=torch.nn.LinearCrossEntropyOptions(),
    )


def chunked_loss_problems(recipe: Recipe, config: Any, made_by: Any) -> Iterator[Problem]:
    """`made_by`: the model's class, None where it is not known."""
    if not recipe.chunked_loss:
        return
    line, instead = "loss: linear_cross_entropy", "loss: standard"
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        yield Problem(f"{line}: PyTorch {torch.__version__} does not have it", instead)
    source = "" if made_by is None else inspect.getsource(inspect.unwrap(made_by.forward))
    made = re.findall(r"^\s*(logits\b[^\n=]*=[^\n]*)$", source, re.MULTILINE)
    made = [each for each in made if not each.startswith("logits=")]
    if made != _LOGITS_ALONE or getattr(config, "output_router_logits", False):
        yield Problem(
            f"{line}: the loss of {config.model_type} is more than that of its head's output", instead
        )


def loss_by_trl(called: Any, batch: Any, num_tokens: Any) -> Tensor:
    """A loss for Training.loss, of a model with TRL's head: its part of the mean over the step's tokens."""
    told = called(**batch, use_cache=False, fused_lm_head=True)
    return (-told.log_probs).sum() / torch.as_tensor(num_tokens).clamp(min=1)
