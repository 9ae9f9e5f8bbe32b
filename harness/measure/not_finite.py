"""Finds where a nan or an infinity came from, once, from the weights and the optimizer's state.

The step itself does not look. When its loss is read the step has ended, and unless a GradScaler skipped the
update, every trained weight is nan: whether one was before can then be known only from a checkpoint of the
moment before that step, whose weights were checked.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from harness.training import Training

Phase = Literal["setup", "forward", "backward", "optimizer_step"]


class Origin(NamedTuple):
    """The phase that made it, None where that cannot be known, and the names of the weights that show it."""

    phase: Phase | None
    weights: list[str]


def origin_of_loss(training: Training, *, first: bool, skipped: bool, were_finite: bool) -> Origin:
    """The origin of a loss that is not finite, looked for after its step.

    - `first`: no step came before.
    - `skipped`: the GradScaler did not let the step change the weights.
    - `were_finite`: the trained weights were looked at before the step, and were finite.
    """
    named = list(training.model.named_parameters())
    frozen = _not_finite((name, weight) for name, weight in named if not weight.requires_grad)
    if frozen:
        return Origin("setup", frozen)
    trained = _not_finite((name, weight) for name, weight in named if weight.requires_grad)
    if were_finite or not trained:  # no update makes a nan finite again
        return Origin("forward", [])
    if not skipped:
        return Origin(None, [])
    # what a scaler lets pass are gradients that are finite
    return Origin("setup" if first else "optimizer_step", trained)


def origin_of_weights(training: Training, names: Sequence[str]) -> Origin:
    """The origin where the trained weights `names` are not finite after a step whose loss was finite."""
    if training.scaler is not None:
        return Origin("optimizer_step", list(names))
    trained = (name for name, weight in training.model.named_parameters() if weight.requires_grad)
    stepped = (weight for group in training.optimizer.param_groups for weight in group["params"])
    weight = dict(zip(trained, stepped, strict=True))[names[0]]
    state = training.optimizer.state.get(weight, {})
    moments = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    if not moments or not all(moment.is_floating_point() for moment in moments):
        return Origin(None, list(names))  # none, or quantized: bitsandbytes makes a finite number of a nan
    gradient_was_wrong = not any(_is_finite(moment) for moment in moments)
    return Origin("backward" if gradient_was_wrong else "optimizer_step", list(names))


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the weights that are not finite."""
    return [name for name, weight in named if weight.is_floating_point() and not _is_finite(weight)]


def _is_finite(tensor: Tensor) -> bool:
    # on the CPU: to look on the device would take memory there
    return bool(tensor.detach().cpu().isfinite().all())
