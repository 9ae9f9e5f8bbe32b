"""How far the power limit slows a step's products down.

Estimates of `sustained` kernels are of a device at its power limit. One that often waits for memory or for
the host takes less power and keeps its boost clock: how much of its time a step computes decides.
"""

from harness.hardware import Hardware
from harness.kernel_time.parameters import limit_reached, power_slowdown


class PowerLimit:
    """Follows the steps of one program on one device."""

    def __init__(self, hardware: Hardware) -> None:
        self._slowdown, self._reached = power_slowdown(hardware), limit_reached(hardware)
        self.factor = self._boost = self._at(0.0)
        """For the next step: the factor, at most 1, on the estimated time of its products in 16 bit. Before
        the first step it is that of the boost clock."""

    def after_step(self, computing: float, whole: float) -> None:
        """A step of `whole` seconds, or another unit, has ended, of which such work took `computing` with the
        present `factor`."""
        if whole <= 0:
            return
        at_boost = computing * self._boost / self.factor
        others = max(0.0, whole - computing)
        self.factor = self._at(at_boost / (at_boost + others) if at_boost else 0.0)

    def _at(self, share: float) -> float:
        """The factor for a step that computes for this share of its time at the boost clock."""
        if self._reached is None:
            return 1.0
        free, full = self._reached
        at_limit = min(1.0, max(0.0, (share - free) / (full - free)))
        return (1 + self._slowdown * at_limit) / (1 + self._slowdown)
