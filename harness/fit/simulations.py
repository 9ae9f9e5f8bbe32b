"""What simulations say of recipes on one device, each asked for once. No torch until one has to run.

A simulation is made with plenty of memory and its requests are kept as a formula (harness/formula), so that
another size between those that were simulated, less memory or another allocator needs no simulation.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import get_context

from harness.allocator import Settings, parse_settings
from harness.errors import CannotDivide, InputError
from harness.formula import Formula, RequestLog, kept_bytes, least_bytes, load, point_of, save
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.recipe import Recipe
from harness.step_profile import StepProfile
from harness.system import installed_version


class Simulations:
    """What simulations say of recipes on `hardware` with an allocator's `settings` (None: the defaults)."""

    def __init__(
        self,
        hardware: Hardware,
        settings: Settings | None = None,
        told: Callable[[str], None] = lambda line: None,
        formulas: dict[str, Formula] | None = None,
        alike: Sequence[Hardware] = (),
    ) -> None:
        self.hardware = hardware
        self.devices = [hardware, *alike]
        """Those that run the same kernels: one simulation times the step on each."""
        self.settings = settings or parse_settings("", installed_version("torch") or "")
        self.told = told
        self._formulas: dict[str, Formula] = {} if formulas is None else formulas
        self._profiles: dict[tuple[Recipe, int], StepProfile] = {}

    def with_settings(self, settings: Settings) -> Simulations:
        """The same simulations, and another allocator."""
        return Simulations(self.hardware, settings, self.told, self._formulas, self.devices[1:])

    def formula(self, recipe: Recipe) -> Formula:
        """What is known of the recipe at other sizes."""
        name = recipe.model_copy(update={"micro_batch_size": 1, "seq_len": 1}).model_dump_json()
        if name not in self._formulas:
            self._formulas[name] = load(recipe, self.hardware)
        return self._formulas[name]

    def profile(self, recipe: Recipe) -> StepProfile:
        """Of one step; `oom` is filled where it runs out. Raises InputError if it cannot be simulated."""
        return self._profile(recipe, self.hardware, self._exactly)

    def with_plenty(self, recipe: Recipe) -> StepProfile:
        """The same if memory did not run out: what the recipe takes at its peak."""
        return self._profile(recipe, with_memory(self.hardware, PLENTY_BYTES), self._exactly)

    def timed(self, recipe: Recipe) -> StepProfile:
        """The same, with the times of a simulation at these very sizes on all devices, now or before."""
        if not self.is_timed(recipe):
            self.simulated(recipe)
            self._profiles.clear()
        return self.with_plenty(recipe)

    def is_timed(self, recipe: Recipe) -> bool:
        """Whether `timed` needs no simulation."""
        formula = self.formula(recipe)
        timed = self.knows(recipe) and formula.has_times(recipe, self.devices)
        return timed or bool(formula.refused)

    def leave(self, recipe: Recipe) -> None:
        """Simulate for another process, which finds it in the cache, or finds out why it cannot be."""
        with suppress(InputError):
            self.timed(recipe)

    def on(self, device: Hardware, recipe: Recipe) -> StepProfile:
        """Of one of the devices, with its own memory."""
        return self.formula(recipe).profile(self._exactly(recipe), recipe, device, self.settings)

    def expected(self, recipe: Recipe) -> StepProfile | None:
        """The profile if what was seen at other sizes goes on; None if nothing is known that could."""
        log = self.requests(recipe)
        return None if log is None else self._profile(recipe, self.hardware, lambda _: log)

    def requests(self, recipe: Recipe) -> RequestLog | None:
        """What the step asks for at these sizes, if what was seen at others goes on; None if nobody knows."""
        formula, point = self.formula(recipe), point_of(recipe)
        piece = formula.knowing(point) or formula.guessing(point)
        try:
            return None if piece is None else piece.at(point)
        except ValueError:
            return None

    def knows(self, recipe: Recipe) -> bool:
        """Whether `profile` needs no simulation."""
        return self.formula(recipe).knowing(point_of(recipe)) is not None

    def explains(self, recipe: Recipe) -> bool:
        """Whether what is known exactly at these sizes says something of others, too."""
        piece = self.formula(recipe).knowing(point_of(recipe))
        return piece is not None and piece.explains

    def least_bytes(self, recipe: Recipe) -> int | None:
        """Memory without which the step does not fit, as far as is known; None if nothing is."""
        log = self.requests(recipe)
        return None if log is None else least_bytes(log) + self.hardware.calibration.cuda_context_bytes

    def kept_bytes(self, recipe: Recipe) -> int:
        """What stays on the device from step to step."""
        return kept_bytes(self._exactly(recipe)) + self.hardware.calibration.cuda_context_bytes

    def keep(self) -> None:
        """Keep what was found for the next question."""
        for formula in self._formulas.values():
            save(formula)

    def _profile(
        self, recipe: Recipe, hardware: Hardware, requests: Callable[[Recipe], RequestLog]
    ) -> StepProfile:
        asked = recipe, hardware.memory_bytes
        if asked not in self._profiles:
            log = requests(recipe)
            found = self.formula(recipe).profile(log, recipe, hardware, self.settings)
            if not self.knows(recipe):
                return found
            self._profiles[asked] = found
        return self._profiles[asked]

    def _exactly(self, recipe: Recipe) -> RequestLog:
        point = point_of(recipe)
        piece = self.formula(recipe).knowing(point)
        return self.simulated(recipe) if piece is None else piece.at(point)

    def simulated(self, recipe: Recipe) -> RequestLog:
        """The requests of a simulation at these sizes, made now. Raises CannotDivide, as it did before."""
        formula = self.formula(recipe)
        if formula.refused:
            raise CannotDivide(formula.refused)
        from harness.simulate import simulate_for_devices

        self.told(f"simulating {_among(recipe)}on {self.hardware.name}")
        try:
            profile, memory, times = simulate_for_devices(recipe, self.devices, self.settings)
        except CannotDivide as error:
            formula.refused, formula.changed = str(error), True
            raise
        else:
            formula.learn(memory.log, profile, memory.labels(), times)
        finally:
            save(formula)
        return memory.log


def all_at_once(asked: Iterable[tuple[Simulations, Recipe]]) -> None:
    """Simulate what is not kept yet in as many processes as there are cores. They leave it in the cache,
    where other Simulations find it; where they cannot, it is simulated in the process that asks for it. Where
    a thread runs, forking is not safe."""
    waiting = [(simulations, recipe) for simulations, recipe in asked if not simulations.is_timed(recipe)]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if len(waiting) < 2 or cores < 2 or threading.active_count() > 1:
        return
    from harness.simulate import import_everything

    for _, recipe in waiting:
        import_everything(recipe)
    fork = get_context("fork").Process
    processes = [fork(target=_leave, args=(waiting[n::cores],)) for n in range(cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _leave(share: list[tuple[Simulations, Recipe]]) -> None:
    for simulations, recipe in share:
        simulations.leave(recipe)


def _among(recipe: Recipe) -> str:
    """Which of several ranks, before the device."""
    return f"rank 0 of {recipe.world_size} " if recipe.world_size > 1 else ""
