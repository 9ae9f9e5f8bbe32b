"""Peaks of setup, of the first step, and of each phase of the recorded steps: what a profile keeps."""

from collections.abc import Sequence

from harness.step_profile import PHASES_BETWEEN_STEPS, PhaseStats
from harness.training import Kind


class PhasePeaks:
    """Bytes, each the largest of its kind so far; None or nothing before the first."""

    def __init__(self, *, all_steps: bool = False) -> None:
        """`all_steps`: whoever notes a phase knows it whole, of a recorded step or not."""
        self.setup_bytes: int | None = None
        self.first_step_bytes: int | None = None
        self.phases: dict[str, PhaseStats] = {}
        """Of the recorded steps, by name; with `all_steps` of every step."""
        self.apart: dict[str, PhaseStats] = {}
        """Of evaluation, generation and saving in steps that were not recorded; with `all_steps` nothing."""
        self._all_steps = all_steps

    def note(
        self, name: str, kinds: Sequence[Kind], peak: int, end: int, reserved: int | None = None
    ) -> PhaseStats | None:
        """The phase `name` has ended, in setup or in the last of the steps that are begun, whose `kinds` are.

        `peak` and `reserved`: largest allocated and reserved bytes within it; `end`: allocated now. Returns
        what is known of a recorded step's phase.
        """
        if not kinds:
            self.setup_bytes = peak
            return None
        if len(kinds) == 1 and name not in PHASES_BETWEEN_STEPS:
            self.first_step_bytes = max(self.first_step_bytes or 0, peak)
        if kinds[-1] != "recorded" and not self._all_steps and name not in PHASES_BETWEEN_STEPS:
            return None
        kept = self.phases if self._all_steps or kinds[-1] == "recorded" else self.apart
        stats = kept.setdefault(name, PhaseStats())
        stats.peak_allocated_bytes = max(stats.peak_allocated_bytes or 0, peak)
        stats.allocated_at_end_bytes = end
        if reserved is not None:
            stats.peak_reserved_bytes = max(stats.peak_reserved_bytes or 0, reserved)
        return stats
