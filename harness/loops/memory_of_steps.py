"""The memory of a watched loop's steps: of those that are to be recorded, and of any that peaks higher."""

from dataclasses import replace
from typing import NamedTuple

from harness.measure import DeviceObserver, LookBack, find_kept, look_back
from harness.run_folder import RunFolder
from harness.step_profile import LeakReport, MemoryStats, leak_in_words
from harness.units import in_gib


class Window(NamedTuple):
    """The steps to record, counted from 1, the last one included."""

    first: int = 3
    last: int = 5


class MemoryOfSteps:
    """Asks the observer about steps once they are over, and keeps the answer where the memory was highest."""

    def __init__(self, observer: DeviceObserver, folder: RunFolder, window: Window) -> None:
        self.looked: LookBack | None = None
        """What was kept: of the recorded steps, or of one with a history that peaked higher."""
        self.leak: LeakReport | None = None
        self._observer, self._folder, self._window = observer, folder, window
        self._looked_at = ""
        """The step or steps that `looked` is of, counted from 1: "7" or "3-5"."""
        self._highest: tuple[int, int] | None = None
        """The most bytes allocated in training so far, and in which step, counted from 1."""

    def is_highest(self, step: int) -> bool:
        """Whether `step`, which runs or has ended just now, peaked higher than all before it."""
        peak = self._observer.peak_bytes()
        if peak is None or (self._highest is not None and peak <= self._highest[0]):
            return False
        self._highest = peak, step
        return True

    def look_back_at_window(self, last: int) -> None:
        """Look back at the recorded steps, of which `last` is the last: what they held, and left behind."""
        found = self.look_back(f"{self._window.first}-{last}")
        self.leak = find_kept(found.history.spans, found.history.step_ends)

    def look_back(self, steps: str, *, ran_out: bool = False) -> LookBack:
        """Look back at what is recorded now, of the steps named `steps`. It is kept, and its history written,
        if it is the first or peaked higher than what was kept. `ran_out`: memory ran out just now.
        """
        found = look_back(self._observer, ran_out=ran_out)
        if self.looked is not None:
            known = self.looked.memory.peak_allocated_bytes or 0
            if not found.history.steps or (found.memory.peak_allocated_bytes or 0) < known:
                return found
        # without the history, which may be gigabytes
        self.looked = replace(found, history=found.history._replace(spans=[], snapshot={}))
        self._looked_at = steps
        if found.history.snapshot and found.memory.peak_allocated_bytes is not None:
            self._folder.write_snapshot(found.history.snapshot)
        return found

    def known(self, step: int) -> tuple[MemoryStats, list[str]]:
        """The memory of the training steps up to `step`, and sentences about it for the warnings."""
        self.is_highest(step)
        warnings = [leak_in_words(self.leak)] if self.leak else []
        memory = self._observer.memory()
        if self.looked is not None:
            seen = self.looked.memory
            names = ("peak_allocated_bytes", "peak_phase", "at_peak", "at_peak_by_step")
            memory = memory.model_copy(update={name: getattr(seen, name) for name in names})
        if self._highest is None:
            return memory, warnings
        known, (highest, at) = memory.peak_allocated_bytes or 0, self._highest
        memory.peak_allocated_bytes, memory.peak_step = max(known, highest), at - 1
        window = f"{self._window.first}-{self._window.last}"
        only = self._window.first == self._window.last
        recorded = f"step {self._window.last}" if only else f"steps {window}"
        if self.looked is None or step <= self._window.last:
            return memory, warnings
        if highest > known:
            memory.peak_phase = None
            warnings.append(
                f"step {at} peaked at {in_gib(highest)}, above the {in_gib(known)} of steps "
                f"{self._looked_at}, and was not recorded: --steps {at} shows what it holds"
            )
        elif self._looked_at != window:
            warnings.append(
                f"step {at} peaked higher than {recorded}: the memory at the peak and snapshot.pickle "
                f"are of step {at}"
            )
        return memory, warnings
