"""Where a nan or an infinity came from: told once, from the weights and the optimizer's state.

The step does not look. When its loss is read it has ended, and unless a GradScaler skipped the update, nan
is in every weight that it trains: then nothing tells any more whether one was there before, except a
checkpoint from the moment before that step, whose weights were looked at.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from harness.training import Training

Phase = Literal["setup", "forward", "backward", "optimizer_step"]


class Origin(NamedTuple):
    """The phase that made it, None where that cannot be told, and the weights that say so, by name."""

    phase: Phase | None
    weights: list[str]


def origin_of_loss(training: Training, *, first: bool, skipped: bool, were_finite: bool) -> Origin:
    """Of a loss that is not finite, looked at after its step.

    - `first`: no step came before.
    - `skipped`: the GradScaler did not let the step change the weights.
    - `were_finite`: the trained weights were looked at before the step, and were finite.
    """
    named = list(training.model.named_parameters())
    frozen = _wrong((name, weight) for name, weight in named if not weight.requires_grad)
    if frozen:
        return Origin("setup", frozen)
    trained = _wrong((name, weight) for name, weight in named if weight.requires_grad)
    if were_finite or not trained:  # no update makes a nan finite again
        return Origin("forward", [])
    if not skipped:
        return Origin(None, [])
    # what a scaler lets pass are gradients that are finite
    return Origin("setup" if first else "optimizer_step", trained)


def origin_of_weights(training: Training, names: Sequence[str]) -> Origin:
    """Of the trained weights `names`, not finite after a step whose loss was finite."""
    if training.scaler is not None:
        return Origin("optimizer_step", list(names))
    trained = (name for name, weight in training.model.named_parameters() if weight.requires_grad)
    stepped = (weight for group in training.optimizer.param_groups for weight in group["params"])
    weight = dict(zip(trained, stepped, strict=True))[names[0]]
    state = training.optimizer.state.get(weight, {})
    moments = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    if not moments or not all(moment.is_floating_point() for moment in moments):
        return Origin(None, list(names))  # none, or quantized: bitsandbytes makes a finite number of a nan
    came_in = not any(_is_finite(moment) for moment in moments)
    return Origin("backward" if came_in else "optimizer_step", list(names))


def _wrong(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, weight in named if weight.is_floating_point() and not _is_finite(weight)]


def _is_finite(tensor: Tensor) -> bool:
    # on the CPU: to look on the device would take memory there
    return bool(tensor.detach().cpu().isfinite().all())
