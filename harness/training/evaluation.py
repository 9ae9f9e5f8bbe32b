"""An evaluation between training steps that keeps tensors where and as long as transformers' Trainer does.

Trainer.evaluation_loop keeps the losses, logits and labels of every batch on the device, appends them to
those of the batches before, and copies them to the host at the end or every `eval_accumulation_steps`
batches. A batch lives until the next one has taken its name. Logits are kept only if metrics are computed of
them (a compute_metrics, and no prediction_loss_only). Of several ranks, every rank gathers and keeps the
results of all.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.data import NOT_PREDICTED
from harness.errors import InputError
from harness.recipe import Recipe
from harness.training.batches import Batch
from harness.training.host_memory import on_host
from harness.training.loop import batches_of, moved
from harness.training.model_config import load_config
from harness.training.step import Observer, Training

MOST_BATCHES = 10_000
"""The most batches of an evaluation: they are simulated one by one."""


@dataclass(frozen=True)
class Evaluation:
    """How to evaluate. Names are those of transformers.TrainingArguments without `eval_`, and so are the
    defaults, except for the number of batches."""

    batches: int = 10
    batch_size: int = 8
    """Rows of a batch: per_device_eval_batch_size."""
    accumulation_steps: int | None = None
    """After so many batches, their results go from the device to the host; None: after all of them."""
    keep_logits: bool = True
    """Whether logits are kept; False for prediction_loss_only, or a Trainer without compute_metrics."""

    def __post_init__(self) -> None:
        for name in ("batches", "batch_size", "accumulation_steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= (MOST_BATCHES if name == "batches" else 2**31):
                most = f" and at most {MOST_BATCHES:,}" if name == "batches" else ""
                raise InputError(f"an evaluation needs {name} of at least 1{most}, not {value}.")


@dataclass(frozen=True)
class Evaluated:
    """The results of an evaluation, on the host: each row's loss, and all rows' logits (rows, tokens,
    vocabulary) and labels (rows, tokens), which are None where they were not kept."""

    losses: Tensor | None
    logits: Tensor | None
    labels: Tensor | None
    logits_dtype: torch.dtype | None
    """The logits' dtype on the device. On the host bfloat16 becomes fp32, since numpy does not have it."""

    @property
    def logits_bytes(self) -> int | None:
        """Bytes of all logits in their dtype on the device; None where they were not kept."""
        if self.logits is None or self.logits_dtype is None:
            return None
        return self.logits.numel() * self.logits_dtype.itemsize

    @property
    def logits_type(self) -> str | None:
        """The name of the logits' dtype on the device."""
        return None if self.logits_dtype is None else str(self.logits_dtype).removeprefix("torch.")


def evaluate(
    recipe: Recipe,
    training: Training,
    evaluation: Evaluation,
    device: torch.device,
    observer: Observer,
    empty_cache: Callable[[], None],
) -> Evaluated:
    """Run `evaluation` with the model after the last training step, in the phase "evaluation".

    `empty_cache` is torch.cuda.empty_cache, or the same for `device`: Trainer calls it whenever it has copied
    results to the host.
    """
    model: Any = training.model
    model.eval()
    with observer.phase("evaluation"):
        evaluated = _evaluated(recipe, training, evaluation, device, empty_cache)
    model.train()
    return evaluated


def _evaluated(
    recipe: Recipe,
    training: Training,
    evaluation: Evaluation,
    device: torch.device,
    empty_cache: Callable[[], None],
) -> Evaluated:
    all_losses, all_logits, all_labels = _Kept(), _Kept(), _Kept()
    ranks = training.ranks
    dtype = None
    for number, batch in enumerate(_batches(recipe, training, evaluation, device), start=1):
        loss, logits, labels = _predicted(recipe, training, batch, evaluation)
        loss = ranks.gathered(loss.repeat(evaluation.batch_size))
        all_losses.add(loss)
        if logits is not None and labels is not None:
            dtype = logits.dtype
            labels = ranks.padded(labels, NOT_PREDICTED)
            logits = ranks.gathered(ranks.padded(logits, NOT_PREDICTED))
            all_logits.add(logits)
            labels = ranks.gathered(labels)
            all_labels.add(labels)
        if evaluation.accumulation_steps is not None and number % evaluation.accumulation_steps == 0:
            for kept in (all_losses, all_logits, all_labels):
                kept.to_host()
            del loss, logits, labels, batch
            empty_cache()
    return Evaluated(all_losses.on_host(), all_logits.on_host(), all_labels.on_host(), dtype)


def _batches(
    recipe: Recipe, training: Training, evaluation: Evaluation, device: torch.device
) -> Iterator[Batch]:
    """The batches on the device, as accelerate's loader yields them: here, and where it is used, a batch
    lives until the next one takes its name."""
    sized = recipe.model_copy(
        update={"micro_batch_size": evaluation.batch_size, "gradient_accumulation_steps": 1}
    )
    steps: Iterable[Any] = batches_of(
        sized, load_config(recipe), training.ranks, shapes_only=device.type == "meta"
    )
    for _, step in zip(range(evaluation.batches), steps, strict=False):
        (batch,) = step.batches
        batch = moved(batch, device)
        yield batch


@torch.no_grad()
def _predicted(
    recipe: Recipe, training: Training, batch: Batch, evaluation: Evaluation
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of a batch, and its logits and labels if they are kept, as in Trainer.prediction_step."""
    num_tokens = (batch["labels"][..., 1:] != NOT_PREDICTED).sum()
    without_logits: dict[str, bool] = {"fused_lm_head": True} if recipe.by_trl else {}
    if (recipe.fused_loss or recipe.chunked_loss) and not evaluation.keep_logits:
        without_logits["skip_logits"] = True
    with training.autocast():
        outputs = training.model(**batch, **without_logits, num_items_in_batch=num_tokens)
        loss = outputs.loss
        if recipe.by_trl and evaluation.keep_logits:  # SFTTrainer computes them in another pass
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            outputs = training.model(**inputs)
    logits = getattr(outputs, "logits", None)
    if recipe.mixed and logits is not None:
        logits = logits.float()  # as accelerate does with the outputs of a model under autocast
    loss = loss.detach().mean()
    return (loss, logits, batch["labels"]) if evaluation.keep_logits else (loss, None, None)


class _Kept:
    """The results of the batches so far: in a tensor on the device, and in one on the host once copied."""

    def __init__(self) -> None:
        self._here: Tensor | None = None
        self._copied: Tensor | None = None

    def add(self, new: Tensor) -> None:
        self._here = new if self._here is None else torch.cat((self._here, new))

    def to_host(self) -> None:
        if self._here is None:
            return
        with on_host():  # as Tensor.cpu(), which shape-only tensors do not have: not pinned, not asynchronous
            device = "meta" if self._here.is_meta else "cpu"
            copied = torch.empty_like(self._here, device=device).copy_(self._here)
            if copied.dtype == torch.bfloat16:
                copied = copied.float()
            self._copied = copied if self._copied is None else torch.cat((self._copied, copied))
        self._here = None

    def on_host(self) -> Tensor | None:
        self.to_host()
        return self._copied
