"""Ask one answer about one recipe: where commands, sweeps, validate and pages get every profile from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from harness.allocator import Settings, allocator_settings
from harness.hardware import DEFAULT_HARDWARE, Hardware, find_hardware
from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step_profile import StepProfile

if TYPE_CHECKING:
    from harness.measure import Progress
    from harness.simulate import SimulatedMemory

Prediction = Literal["napkin", "simulated"]


class Silent:
    """A measurement's Progress (measure/observer.py) that shows nothing."""

    def step(self, *_: Any, **__: Any) -> None:
        """See measure/observer.py."""


def predicted(
    source: Prediction,
    recipe: Recipe,
    hardware: Hardware | None = None,
    environment: Mapping[str, str] = os.environ,
) -> StepProfile:
    """The napkin or simulated profile, under the allocator settings of `environment`. Raises InputError."""
    hardware = hardware or find_hardware(DEFAULT_HARDWARE)
    if source == "napkin":
        from harness.napkin import predict

        return predict(recipe, hardware)
    from harness.simulate import simulate

    return simulate(recipe, hardware, allocator_settings(environment), explain_oom=False)[0]


def simulated(recipe: Recipe, hardware: Hardware, settings: Settings) -> tuple[StepProfile, SimulatedMemory]:
    """The simulated profile with advice where the memory runs out, and the memory with its history."""
    from harness.fit import advise
    from harness.simulate import simulate

    return simulate(recipe, hardware, settings, advise=advise)


def measured(
    recipe: Recipe,
    folder: RunFolder,
    device: str | None = None,
    progress: Progress | None = None,
    *,
    snapshot: bool = True,
) -> StepProfile:
    """The profile of a run on `device` of this machine (default: the first GPU, else the CPU) into `folder`.

    Raises InputError for a device that is not there, and where the host's memory cannot hold the recipe.
    """
    from harness.fit import advise, check_host_memory
    from harness.measure import chosen_device, measure

    where = chosen_device(device)
    unchecked = check_host_memory(recipe, where.type)
    return measure(
        recipe,
        folder,
        progress or Silent(),
        where,
        snapshot=snapshot,
        advise=advise,
        warnings=[unchecked] if unchecked else [],
    )
