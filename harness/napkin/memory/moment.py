"""One moment of a step: what is alive on the device, by what it is. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.napkin.memory.in_flight import IN_FLIGHT, InFlight, offloaded
from harness.napkin.memory.liveness import StagePeak
from harness.napkin.memory.sizes import Sizes
from harness.napkin.tape.stages import Stage

Phase = Literal["setup", "forward", "loss", "backward", "optimizer_step"]
"""`loss` is the first piece of backward."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive on the device at one moment, by what they are."""

    phase: Phase
    where: str
    """For people alone."""
    parameters: int = 0
    gathered_parameters: int = 0
    """Units of weights that are whole, and the buffers they are gathered into."""
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0
    inputs: int = 0
    other: int = 0

    @property
    def total_bytes(self) -> int:
        held = self.parameters + self.gathered_parameters + self.gradients + self.optimizer_state
        return held + self.activations + self.temporaries + self.inputs + self.other


def moment_of(sizes: Sizes, phase: Phase, where: str, **parts: int) -> Moment:
    """A moment of the step: `parts`, and what is there throughout."""
    settled = {
        "parameters": sizes.device_parameters(),
        "optimizer_state": sizes.device_state,
        "inputs": sizes.input_bytes,
        "other": sizes.hardware.cublas_workspace_bytes + sizes.lost_bytes,
    }
    parts["gradients"] = parts.get("gradients", 0) + sizes.bucket_bytes
    return Moment(phase=phase, where=where, **settled | parts)


def repeated(stages: Sequence[Stage]) -> list[Stage]:
    """Each stage as many times as it is there."""
    return [stage for stage in stages for _ in range(stage.count)]


def in_flight_of(sizes: Sizes, before: Sequence[Stage]) -> InFlight | None:
    """What offloaded activations have on the device, after or below the stages `before`."""
    if not sizes.recipe.activations_on_host:
        return None
    saved = [t.size_bytes for stage in reversed(before) for t in reversed(offloaded(stage.saved))]
    return InFlight(IN_FLIGHT, saved[:IN_FLIGHT])


def during(peak: StagePeak) -> str:
    return peak.op.name if peak.op else ""
