"""The toggles `loss: linear_cross_entropy` and `loss: fused_lm_head`: losses of PyTorch and of TRL that never
hold all logits.

PyTorch's takes the last states and the head's weight (torch.nn.functional.linear_cross_entropy with options,
which computes in chunks, and the gradients of both in forward). TRL's is the one of its SFTTrainer
(trl/trainer/sft_trainer.py, compute_loss), with the head that toggles/preference.py gives the model.
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
"""The lines about logits in a forward whose loss depends on the head's output alone."""


def chunk_loss(recipe: Recipe, model: Any) -> None:
    """Have the model's forward, with labels, compute the loss from the last states and no logits: in
    training, or if its argument skip_logits is true, as Liger's models have it."""
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
    # 1 / num_tokens is the weight of each word: the loss has the states' dtype, and in 16 bit a sum over
    # tokens would be too large or too coarse, and dividing it afterwards would round the gradients
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


def chunked_loss_problems(recipe: Recipe, config: Any, architecture: Any) -> Iterator[Problem]:
    """`architecture`: the model's class; None where it is not known."""
    if not recipe.chunked_loss:
        return
    line, instead = "loss: linear_cross_entropy", "loss: standard"
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        yield Problem(f"{line}: PyTorch {torch.__version__} does not have it", instead)
    source = "" if architecture is None else inspect.getsource(inspect.unwrap(architecture.forward))
    lines = re.findall(r"^\s*(logits\b[^\n=]*=[^\n]*)$", source, re.MULTILINE)
    lines = [each for each in lines if not each.startswith("logits=")]
    if lines != _LOGITS_ALONE or getattr(config, "output_router_logits", False):
        yield Problem(
            f"{line}: the loss of {config.model_type} is more than that of its head's output", instead
        )


def loss_by_trl(called: Any, batch: Any, num_tokens: Any) -> Tensor:
    """A loss for Training.loss, of a model with TRL's head: the micro batch's part of the mean over the
    step's tokens."""
    outputs = called(**batch, use_cache=False, fused_lm_head=True)
    return (-outputs.log_probs).sum() / torch.as_tensor(num_tokens).clamp(min=1)
