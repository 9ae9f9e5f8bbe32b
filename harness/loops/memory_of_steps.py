"""What the memory of a loop's steps was: of those that are to be recorded, and of one that peaks higher."""

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
    """Looks back at steps once they are over, and keeps what it saw where the memory was highest."""

    def __init__(self, observer: DeviceObserver, folder: RunFolder, window: Window) -> None:
        self.looked: LookBack | None = None
        """At the recorded steps, or at one with a history that peaked higher."""
        self.leak: LeakReport | None = None
        self._observer, self._folder, self._window = observer, folder, window
        self._looked_at = ""
        """Which step or steps, counted from 1."""
        self._highest: tuple[int, int] | None = None
        """Most bytes allocated in training, and in which step, counted from 1."""

    def is_highest(self, step: int) -> bool:
        """Whether `step`, which runs or has ended just now, peaked higher than all before it."""
        peak = self._observer.peak_bytes()
        if peak is None or (self._highest is not None and peak <= self._highest[0]):
            return False
        self._highest = peak, step
        return True

    def look_back_at_window(self, last: int) -> None:
        """At the recorded steps, `last` of which is the last: what they held, and what each left behind."""
        found = self.look_back(f"{self._window.first}-{last}")
        self.leak = find_kept(found.history.spans, found.history.step_ends)

    def look_back(self, steps: str, *, ran_out: bool = False) -> LookBack:
        """At what is recorded now, which is `steps`; kept, and its history written, if no other was as high
        or if nothing is known yet.
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
        """The memory of the training steps so far, `step` the last, and what is to be said about it."""
        self.is_highest(step)
        said = [leak_in_words(self.leak)] if self.leak else []
        memory = self._observer.memory()
        if self.looked is not None:
            seen = self.looked.memory
            names = ("peak_allocated_bytes", "peak_phase", "at_peak", "at_peak_by_step")
            memory = memory.model_copy(update={name: getattr(seen, name) for name in names})
        if self._highest is None:
            return memory, said
        known, (highest, at) = memory.peak_allocated_bytes or 0, self._highest
        memory.peak_allocated_bytes, memory.peak_step = max(known, highest), at - 1
        window = f"{self._window.first}-{self._window.last}"
        only = self._window.first == self._window.last
        recorded = f"step {self._window.last}" if only else f"steps {window}"
        if self.looked is None or step <= self._window.last:
            return memory, said
        if highest > known:
            memory.peak_phase = None
            said.append(
                f"step {at} peaked at {in_gib(highest)}, above the {in_gib(known)} of steps "
                f"{self._looked_at}, and was not recorded: --steps {at} shows what it holds"
            )
        elif self._looked_at != window:
            said.append(
                f"step {at} peaked higher than {recorded}: the memory at the peak and snapshot.pickle "
                f"are of step {at}"
            )
        return memory, said
