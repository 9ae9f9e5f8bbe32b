"""What follows training steps now and then, beside the profile of a step: an evaluation, a checkpoint."""

from __future__ import annotations

from pydantic import Field

from harness.step_profile.fields import Count, Fields

PHASES_BETWEEN_STEPS = ("evaluation", "checkpoint")
"""Where they were asked for. A profile's `memory` and `step` are of a training step without them."""


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
    accumulation_steps: Count | None = None
    """Batches whose logits stay on the device before they go to the host; None: all of them."""
    keeps_logits: bool = True
    """False: prediction_loss_only, or a Trainer without compute_metrics."""
    logits_bytes: Count | None = None
    """The logits of all batches, in `logits_dtype`."""
    logits_dtype: str | None = None
    host_bytes: Count | None = None
    """What it puts into host memory, at most. bfloat16 becomes fp32 there: numpy has none."""
    instead: list[EvaluationWay] = Field(default_factory=list, max_length=100)
    """Other ways, where this one takes more than a training step."""


class CheckpointStats(Fields):
    """A checkpoint as transformers' Trainer writes it. Its peaks and its time: `phases["checkpoint"]`."""

    weights_bytes: Count | None = None
    """Of the model, or of its adapter alone."""
    optimizer_bytes: Count | None = None
    host_bytes: Count | None = None
    """Copies in host memory, at most. What is on the host anyway is not copied."""
