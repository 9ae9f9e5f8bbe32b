"""What runs between training steps and has figures of its own in a profile: an evaluation, a checkpoint."""

from pydantic import Field

from harness.step_profile.fields import Count, Fields

PHASES_BETWEEN_STEPS = ("evaluation", "generation", "saving")
"""Phases that a profile has where they were asked for, or found in a loop. Its `memory` and `step` are those
of a training step without them; each of these phases has a peak of its own."""


class EvaluationWay(Fields):
    """The same evaluation with other settings, whether it fits and what it takes."""

    accumulation_steps: Count | None = None
    keeps_logits: bool = True
    fits: bool
    peak_allocated_bytes: Count | None = None
    host_bytes: Count | None = None


class EvaluationStats(Fields):
    """An evaluation as transformers' Trainer does it. Its peaks and its time: `phases["evaluation"]`."""

    batches: Count
    batch_size: Count
    """Rows of a batch, on each rank."""
    ranks: Count = 1
    """How many ranks evaluate; every rank gathers and keeps the results of all."""
    accumulation_steps: Count | None = None
    """Batches whose logits stay on the device before they go to the host; None: all of them."""
    keeps_logits: bool = True
    """False: prediction_loss_only, or a Trainer without compute_metrics."""
    logits_bytes: Count | None = None
    """The logits of all batches, of all ranks, in `logits_dtype`."""
    logits_dtype: str | None = None
    host_bytes: Count | None = None
    """The most that it puts into host memory. bfloat16 becomes fp32 there, since numpy has no bfloat16."""
    instead: list[EvaluationWay] = Field(default_factory=list[EvaluationWay], max_length=100)
    """Other settings, where these take more than a training step."""


class CheckpointStats(Fields):
    """A checkpoint as transformers' Trainer writes it. Its peaks and its time: `phases["saving"]`."""

    weights_bytes: Count | None = None
    """The weights in the file: the model's or its adapter's alone; on several ranks this rank's."""
    optimizer_bytes: Count | None = None
    host_bytes: Count | None = None
    """The most that it copies into host memory. What is on the host anyway is not copied."""
    part: bool = False
    """Whether every rank writes its own part of a divided model."""
