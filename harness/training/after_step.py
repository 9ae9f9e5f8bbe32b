"""What can follow the training steps: an evaluation and a checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from harness.errors import InputError
from harness.recipe import Recipe
from harness.step_profile import EvaluationStats
from harness.training.evaluation import Evaluation, evaluate
from harness.training.step import Observer, Training

HostPeak = AbstractContextManager[Callable[[], int | None]]
"""A context whose value is a function: it returns the most bytes by which host memory has grown since the
context began, or None where that is not known."""


@dataclass(frozen=True)
class AfterStep:
    """What to simulate or to measure after the training steps."""

    evaluation: Evaluation | None = None
    checkpoint: bool = False
    """Whether a checkpoint is written."""
    whole_state: bool = False
    """Whether rank 0 writes the whole of a model that is divided among ranks, or each rank its part."""


def stats_of(evaluation: Evaluation, recipe: Recipe) -> EvaluationStats:
    """The statistics of an evaluation that has not begun."""
    return EvaluationStats(
        batches=evaluation.batches,
        batch_size=evaluation.batch_size,
        ranks=recipe.data_parallel_ranks,
        accumulation_steps=evaluation.accumulation_steps,
        keeps_logits=evaluation.keep_logits,
    )


def evaluate_into(
    stats: EvaluationStats,
    recipe: Recipe,
    training: Training,
    evaluation: Evaluation,
    device: torch.device,
    observer: Observer,
    empty_cache: Callable[[], None],
    host_peak: HostPeak,
) -> None:
    """Run the evaluation and fill in `stats`. If memory runs out, `stats` still gets the bytes on the host.

    Raises InputError for a task other than sft.
    """
    if not recipe.writes:
        raise InputError(
            f"task: {recipe.task}: only an evaluation of texts is known here; leave eval out, or set "
            "task: sft."
        )
    with host_peak as host_bytes:
        try:
            evaluated = evaluate(recipe, training, evaluation, device, observer, empty_cache)
        finally:
            stats.host_bytes = host_bytes()
    stats.logits_bytes, stats.logits_dtype = evaluated.logits_bytes, evaluated.logits_type
