"""What follows the training steps where it is asked for: an evaluation, a checkpoint."""

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
"""Inside: a function that says how many bytes more than before were in host memory at most, if known."""


@dataclass(frozen=True)
class AfterStep:
    """What to simulate or to measure behind the training steps."""

    evaluation: Evaluation | None = None
    checkpoint: bool = False
    whole_state: bool = False
    """Where the model is divided among ranks: whether rank 0 writes all of it, or each rank its part."""


def stats_of(evaluation: Evaluation, recipe: Recipe) -> EvaluationStats:
    """Of an evaluation that has not begun."""
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
    """Run the evaluation and fill `stats`: with what it puts on the host also where memory runs out in it."""
    if not recipe.writes:
        raise InputError(
            f"task: {recipe.task}: only an evaluation of texts is known here; leave eval out, or set "
            "task: sft."
        )
    with host_peak as host_bytes:
        try:
            done = evaluate(recipe, training, evaluation, device, observer, empty_cache)
        finally:
            stats.host_bytes = host_bytes()
    stats.logits_bytes, stats.logits_dtype = done.logits_bytes, done.logits_type
