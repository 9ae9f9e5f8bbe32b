"""Simulated steps on one device, each simulated once. No torch until one is asked for."""

from __future__ import annotations

from harness.allocator import Settings
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.recipe import Recipe
from harness.step_profile import StepProfile


class Simulations:
    """What simulations say of recipes on `hardware` with an allocator's `settings` (None: the defaults).

    Two searches and the prices of changes all ask about the recipe as it is: it is simulated for one of them.
    """

    def __init__(self, hardware: Hardware, settings: Settings | None = None) -> None:
        self.hardware, self.settings = hardware, settings
        self._profiles: dict[tuple[Recipe, int], StepProfile] = {}

    def profile(self, recipe: Recipe) -> StepProfile:
        """Of one step; `oom` is filled where it runs out. Raises InputError if it cannot be simulated."""
        return self._profile(recipe, self.hardware)

    def with_plenty(self, recipe: Recipe) -> StepProfile:
        """The same if memory did not run out: what the recipe takes at its peak."""
        return self._profile(recipe, with_memory(self.hardware, PLENTY_BYTES))

    def _profile(self, recipe: Recipe, hardware: Hardware) -> StepProfile:
        from harness.simulate import simulate

        asked = recipe, hardware.memory_bytes
        if asked not in self._profiles:
            self._profiles[asked] = simulate(recipe, hardware, self.settings, explain_oom=False)[0]
        return self._profiles[asked]
