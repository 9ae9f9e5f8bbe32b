"""Setup and loop: what training, measuring and simulating all do around the one training step."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from harness.parallel import Ranks, ranks_of
from harness.recipe import RECORDED_STEPS, Recipe
from harness.training.batches import Batch, Batches, build_batches
from harness.training.failures import errors_explained
from harness.training.images import images_of
from harness.training.model import build_training
from harness.training.step import Training, train_step
from harness.training.toggles.scores import pad_alike

Kind = Literal["warmup", "timed", "recorded"]
"""What a step is for. warmup: its results are dropped; timed: its times are measured and nothing else;
recorded: its allocations are recorded."""


class LoopObserver(Protocol):
    """An Observer (training/step.py) that also hears which step begins."""

    def begin_step(self, index: int, kind: Kind) -> None: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Step:
    """One finished optimizer step. `loss` is a scalar still on the device."""

    index: int
    kind: Kind
    loss: Tensor
    """This rank's loss. `Ranks.averaged` makes the step's loss of those of several ranks."""
    num_tokens: int
    """How many tokens of this rank's rows are predicted."""


def set_up(recipe: Recipe, device: torch.device, observer: LoopObserver) -> tuple[Training, Batches]:
    """Build what the steps need. The data comes first, since it is most often wrong."""
    from harness.training.model_config import load_config

    with observer.phase("setup"):
        ranks = ranks_of(recipe, device)
        batches = batches_of(recipe, load_config(recipe), ranks, shapes_only=device.type == "meta")
        training = build_training(recipe, device, ranks)
        pad_alike(recipe, training.model, batches.rows.padding)
        return training, batches


def run_steps(
    training: Training,
    batches: Iterator[Any],
    device: torch.device,
    kinds: Sequence[Kind],
    observer: LoopObserver,
    first: int = 0,
) -> Iterator[Step]:
    """Run one step for each of `kinds`, and yield it when its work is queued: on a GPU it is not done yet.

    Steps are numbered from `first`.
    """
    for index, kind in enumerate(kinds, first):
        observer.begin_step(index, kind)
        with observer.phase("data"):
            host_batches, num_tokens = next(batches)
            micro_batches = [moved(batch, device) for batch in host_batches]
            shared_tokens = training.ranks.shared(num_tokens)
        with errors_explained(training.model):
            loss = train_step(training, micro_batches, shared_tokens, observer)
        del micro_batches  # else they would live while the next step's inputs are made
        yield Step(index, kind, loss, num_tokens)


def step_kinds(recipe: Recipe) -> list[Kind]:
    """The kinds of a run's steps in order: warmup, timed, recorded."""
    kinds: list[tuple[Kind, int]] = [
        ("warmup", recipe.warmup_steps),
        ("timed", recipe.steps),
        ("recorded", RECORDED_STEPS),
    ]
    return [kind for kind, steps in kinds for _ in range(steps)]


def remaining_kinds(kinds: Sequence[Kind], first: int, warmup_steps: int) -> list[Kind]:
    """The kinds of a resumed run's steps, which are those of `kinds` from `first` on. Timed ones become
    warmup until there are `warmup_steps` of these; the last one stays timed.
    """
    remaining = list(kinds[first:])
    timed = [n for n, kind in enumerate(remaining) if kind == "timed"]
    for n in timed[: max(0, min(warmup_steps - remaining.count("warmup"), len(timed) - 1))]:
        remaining[n] = "warmup"
    return remaining


def moved(batch: Batch, device: torch.device) -> Batch:
    """A copy of the batch on `device`."""
    return {
        # copy=True: on the CPU too the step has inputs of its own
        name: value.to(device, non_blocking=True, copy=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def batches_of(recipe: Recipe, config: Any, ranks: Ranks, *, shapes_only: bool) -> Batches:
    """The batches of `recipe` for the model of `config`; with `shapes_only` for shape-only tensors."""
    text = config.get_text_config()
    return build_batches(
        recipe,
        vocab_size=text.vocab_size,
        tokenizer_source=recipe.model if recipe.weights == "pretrained" else None,
        dense_mask=not recipe.masks_by_position,
        sliding_window=getattr(text, "sliding_window", None),
        shapes_only=shapes_only,
        ranks=ranks,
        images=images_of(recipe, config),
    )
