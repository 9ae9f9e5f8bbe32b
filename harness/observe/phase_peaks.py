"""Keeps the peaks that a profile has: of setup, of the first step, and of each phase of recorded steps."""

from collections.abc import Sequence

from harness.step_profile import PHASES_BETWEEN_STEPS, PhaseStats
from harness.training import Kind


class PhasePeaks:
    """The peaks so far, in bytes; None or empty before the first."""

    def __init__(self, *, all_steps: bool = False) -> None:
        """`all_steps`: the peaks that are noted are exact in every step, and not in recorded ones alone."""
        self.setup_bytes: int | None = None
        self.first_step_bytes: int | None = None
        self.phases: dict[str, PhaseStats] = {}
        """By name, the phases of the recorded steps; with `all_steps` of every step."""
        self.apart: dict[str, PhaseStats] = {}
        """Evaluation, generation and saving in steps that were not recorded; empty with `all_steps`."""
        self._all_steps = all_steps

    def note(
        self, name: str, kinds: Sequence[Kind], peak: int, end: int, reserved: int | None = None
    ) -> PhaseStats | None:
        """Note that the phase `name` has ended. `kinds`: those of all steps that have begun, of which the
        last one had the phase; empty in setup.

        `peak` and `reserved`: the most bytes allocated and reserved within it; `end`: the bytes allocated
        now. Returns the phase's statistics, None where it has none.
        """
        if not kinds:
            self.setup_bytes = peak
            return None
        if len(kinds) == 1 and name not in PHASES_BETWEEN_STEPS:
            self.first_step_bytes = max(self.first_step_bytes or 0, peak)
        if kinds[-1] != "recorded" and not self._all_steps and name not in PHASES_BETWEEN_STEPS:
            return None
        by_name = self.phases if self._all_steps or kinds[-1] == "recorded" else self.apart
        stats = by_name.setdefault(name, PhaseStats())
        stats.peak_allocated_bytes = max(stats.peak_allocated_bytes or 0, peak)
        stats.allocated_at_end_bytes = end
        if reserved is not None:
            stats.peak_reserved_bytes = max(stats.peak_reserved_bytes or 0, reserved)
        return stats
