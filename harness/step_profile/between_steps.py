"""What follows training steps now and then, beside the profile of a step: an evaluation, a checkpoint."""

from pydantic import Field

from harness.step_profile.fields import Count, Fields

PHASES_BETWEEN_STEPS = ("evaluation", "generation", "saving")
"""Where they were asked for, or found in a loop. A profile's `memory` and `step` are of a training step
without them; each has a peak of its own."""


class EvaluationWay(Fields):
    """The same evaluation with other settings, and what it takes."""

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
    """Whose results every rank gathers, and keeps."""
    accumulation_steps: Count | None = None
    """Batches whose logits stay on the device before they go to the host; None: all of them."""
    keeps_logits: bool = True
    """False: prediction_loss_only, or a Trainer without compute_metrics."""
    logits_bytes: Count | None = None
    """The logits of all batches, of all ranks, in `logits_dtype`."""
    logits_dtype: str | None = None
    host_bytes: Count | None = None
    """What it puts into host memory, at most. bfloat16 becomes fp32 there: numpy has none."""
    instead: list[EvaluationWay] = Field(default_factory=list[EvaluationWay], max_length=100)
    """Other ways, where this one takes more than a training step."""


class CheckpointStats(Fields):
    """A checkpoint as transformers' Trainer writes it. Its peaks and its time: `phases["saving"]`."""

    weights_bytes: Count | None = None
    """Of the model, or of its adapter alone; this process's, if a rank of several."""
    optimizer_bytes: Count | None = None
    host_bytes: Count | None = None
    """Copies in host memory, at most. What is on the host anyway is not copied."""
    part: bool = False
    """Whether every rank writes its own part of a divided model."""
