"""An evaluation between training steps, as transformers' Trainer does it: what it keeps, where, and how long.

Trainer.evaluation_loop keeps the losses, the logits and the labels of every batch on the device, joins each
batch to those before, and copies them to the host at the end or every `eval_accumulation_steps` batches. The
batch before stays alive until the next one has taken its name. Logits are kept only where metrics are
computed of them (a compute_metrics, and no prediction_loss_only). Among several ranks every rank gathers the
results of all, and keeps them all.
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
"""That are walked through one by one."""


@dataclass(frozen=True)
class Evaluation:
    """How to evaluate, by the names of transformers.TrainingArguments without their `eval_`; defaults too,
    except how many batches there are."""

    batches: int = 10
    batch_size: int = 8
    """per_device_eval_batch_size"""
    accumulation_steps: int | None = None
    """Batches whose logits stay on the device before they go to the host; None: all of them."""
    keep_logits: bool = True
    """False: prediction_loss_only, or a Trainer without compute_metrics."""

    def __post_init__(self) -> None:
        for name in ("batches", "batch_size", "accumulation_steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= (MOST_BATCHES if name == "batches" else 2**31):
                most = f" and at most {MOST_BATCHES:,}" if name == "batches" else ""
                raise InputError(f"an evaluation needs {name} of at least 1{most}, not {value}.")


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation leaves on the host: a loss a row, and of all rows the logits (rows, tokens, words)
    and the labels (rows, tokens), None where they were not kept."""

    losses: Tensor | None
    logits: Tensor | None
    labels: Tensor | None
    logits_dtype: torch.dtype | None
    """On the device. On the host there is no bfloat16: numpy has none."""

    @property
    def logits_bytes(self) -> int | None:
        """All logits as the device had them; None where they were not kept."""
        if self.logits is None or self.logits_dtype is None:
            return None
        return self.logits.numel() * self.logits_dtype.itemsize

    @property
    def logits_type(self) -> str | None:
        """The name of their dtype on the device."""
        return None if self.logits_dtype is None else str(self.logits_dtype).removeprefix("torch.")


def evaluate(
    recipe: Recipe,
    training: Training,
    evaluation: Evaluation,
    device: torch.device,
    observer: Observer,
    empty_cache: Callable[[], None],
) -> Evaluated:
    """Run `evaluation` with the model as the last training step left it, in the phase "evaluation".

    `empty_cache`: torch.cuda.empty_cache, of the device; Trainer calls it whenever it has copied to the host.
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
    """On the device, as accelerate's loader gives them: a batch lives until the next one comes, here and
    where it is used."""
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
    """Trainer.prediction_step: loss, and if they are kept, logits and labels of a batch."""
    num_tokens = (batch["labels"][..., 1:] != NOT_PREDICTED).sum()
    without_logits: dict[str, bool] = {"fused_lm_head": True} if recipe.by_trl else {}
    if (recipe.fused_loss or recipe.chunked_loss) and not evaluation.keep_logits:
        without_logits["skip_logits"] = True
    with training.autocast():
        outputs = training.model(**batch, **without_logits, num_items_in_batch=num_tokens)
        loss = outputs.loss
        if recipe.by_trl and evaluation.keep_logits:  # SFTTrainer asks for them by another pass
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            outputs = training.model(**inputs)
    logits = getattr(outputs, "logits", None)
    if recipe.mixed and logits is not None:
        logits = logits.float()  # accelerate: what a model under autocast returns is fp32 for its user
    loss = loss.detach().mean()
    return (loss, logits, batch["labels"]) if evaluation.keep_logits else (loss, None, None)


class _Kept:
    """Results of the batches so far, joined: on the device, and on the host those that were copied there."""

    def __init__(self) -> None:
        self._here: Tensor | None = None
        self._copied: Tensor | None = None

    def add(self, new: Tensor) -> None:
        self._here = new if self._here is None else torch.cat((self._here, new))

    def to_host(self) -> None:
        if self._here is None:
            return
        with on_host():  # Tensor.cpu(), which a shape-only tensor has not: neither pinned nor asynchronous
            device = "meta" if self._here.is_meta else "cpu"
            copied = torch.empty_like(self._here, device=device).copy_(self._here)
            if copied.dtype == torch.bfloat16:
                copied = copied.float()
            self._copied = copied if self._copied is None else torch.cat((self._copied, copied))
        self._here = None

    def on_host(self) -> Tensor | None:
        self.to_host()
        return self._copied
