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
from typing import TypeVar

from harness.allocator import Settings, parse_settings
from harness.errors import CannotDivide, InputError
from harness.fit.few_layers import FewLayers
from harness.formula import Formula, NotRepeated, kept_bytes, load, point_of, save, timed_on
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.recipe import Recipe
from harness.step_profile import StepProfile
from harness.system import installed_version
from harness.units import counted

A = TypeVar("A")
B = TypeVar("B")


class Simulations:
    """What simulations say of recipes on `hardware` with an allocator's `settings` (None: the defaults)."""

    def __init__(
        self,
        hardware: Hardware,
        settings: Settings | None = None,
        told: Callable[[str], None] = lambda line: None,
        formulas: dict[str, Formula] | None = None,
        alike: Sequence[Hardware] = (),
        *,
        few_layers: bool = False,
    ) -> None:
        self.hardware = hardware
        self.devices = [hardware, *alike]
        """Those that run the same kernels: one simulation times the step on each."""
        self.settings = settings or parse_settings("", installed_version("torch") or "")
        self.told = told
        self._formulas: dict[str, Formula] = {} if formulas is None else formulas
        self._profiles: dict[tuple[Recipe, int], StepProfile] = {}
        self._few_layers = FewLayers(self.devices, self.settings) if few_layers else None
        """None: all layers are simulated."""

    def with_settings(self, settings: Settings) -> Simulations:
        """The same simulations, and another allocator."""
        other = Simulations(self.hardware, settings, self.told, self._formulas, self.devices[1:])
        other._few_layers = self._few_layers
        return other

    def formula(self, recipe: Recipe) -> Formula:
        """What is known of the recipe at other sizes."""
        name = recipe.model_copy(update={"micro_batch_size": 1, "seq_len": 1}).model_dump_json()
        if name not in self._formulas:
            self._formulas[name] = load(recipe, self.hardware)
            if self._few_layers is None:
                self._formulas[name].forget_few_layers()
        return self._formulas[name]

    def profile(self, recipe: Recipe) -> StepProfile:
        """Of one step; `oom` is filled where it runs out. Raises InputError if it cannot be simulated."""
        self._learn(recipe)
        return self._profile(recipe, self.hardware)

    def with_plenty(self, recipe: Recipe) -> StepProfile:
        """The same if memory did not run out: what the recipe takes at its peak."""
        self._learn(recipe)
        return self._profile(recipe, with_memory(self.hardware, PLENTY_BYTES))

    def timed(self, recipe: Recipe) -> StepProfile:
        """The same, with the times of a simulation at these very sizes on all devices, now or before."""
        self.time(recipe)
        return self.with_plenty(recipe)

    def time(self, recipe: Recipe) -> None:
        """Simulate at these very sizes unless that was done: a formula knows their memory, not their time."""
        if not self.is_timed(recipe):
            self._simulate(recipe, timed=True)
            self._profiles.clear()

    def is_timed(self, recipe: Recipe) -> bool:
        """Whether `time` needs no simulation."""
        formula = self.formula(recipe)
        timed = self.knows(recipe) and formula.has_times(recipe, self.devices)
        return timed or bool(formula.refused)

    def on(self, device: Hardware, recipe: Recipe) -> StepProfile:
        """Of one of the devices, with its own memory."""
        self._learn(recipe)
        return self.formula(recipe).profile(recipe, device, self.settings)

    def expected(self, recipe: Recipe) -> StepProfile | None:
        """The profile if what was seen at other sizes goes on; None if nothing is known that could."""
        return None if self.least_bytes(recipe) is None else self._profile(recipe, self.hardware)

    def knows(self, recipe: Recipe) -> bool:
        """Whether `profile` needs no simulation."""
        return self.formula(recipe).knowing(point_of(recipe)) is not None

    def simulated_before(self, recipe: Recipe, field: str) -> list[int]:
        """Values of a size at which the recipe was simulated, with the other size as it is."""
        here, points = point_of(recipe)._asdict(), self.formula(recipe).simulated_at()
        others = {name: value for name, value in here.items() if name != field}
        return [point._asdict()[field] for point in points if others.items() <= point._asdict().items()]

    def explains(self, recipe: Recipe) -> bool:
        """Whether what is known exactly at these sizes says something of others, too."""
        piece = self.formula(recipe).knowing(point_of(recipe))
        return piece is not None and piece.explains

    def least_bytes(self, recipe: Recipe) -> int | None:
        """Memory without which the step does not fit, as far as is known; None if nothing is."""
        found = self.formula(recipe).least_bytes(point_of(recipe))
        return None if found is None else found + self.hardware.calibration.cuda_context_bytes

    def kept_bytes(self, recipe: Recipe) -> int:
        """What stays on the device from step to step."""
        self._learn(recipe)
        log = self.formula(recipe).requests(point_of(recipe))
        assert log is not None
        return kept_bytes(log) + self.hardware.calibration.cuda_context_bytes

    @property
    def learned(self) -> dict[str, Formula]:
        """By recipe: what `merge` takes in another process."""
        return self._formulas

    def merge(self, learned: dict[str, Formula]) -> None:
        """What another process learned."""
        for name, formula in learned.items():
            known = self._formulas.setdefault(name, formula)
            if known is not formula:
                known.merge(formula)

    def keep(self) -> None:
        """Keep what was found for the next question."""
        for formula in self._formulas.values():
            save(formula)

    def _profile(self, recipe: Recipe, hardware: Hardware) -> StepProfile:
        asked = recipe, hardware.memory_bytes
        if asked not in self._profiles:
            found = self.formula(recipe).profile(recipe, hardware, self.settings)
            if not self.knows(recipe):
                return found
            self._profiles[asked] = found
        return self._profiles[asked]

    def _learn(self, recipe: Recipe) -> None:
        """Simulate at these sizes, unless that is known."""
        if not self.knows(recipe):
            self._simulate(recipe)

    def confirm(self, recipe: Recipe) -> None:
        """See that the model with all of its layers asks for what simulations of few of them say, unless that
        was seen. Raises NotRepeated where it does not: the few layers were wrong, and all must be asked."""
        expected, point = self.formula(recipe).knowing(point_of(recipe)), point_of(recipe)
        if expected is None or expected.knows_whole(point):
            return
        self.simulated(recipe)
        self._profiles.clear()
        if not expected.knows_whole(point):
            raise NotRepeated(f"{recipe.model} has layers that do not repeat")

    def _simulate(self, recipe: Recipe, *, timed: bool = False) -> None:
        """With few layers where they are asked for and say what all of them do; else with all."""
        formula = self.formula(recipe)
        if self._few_layers is not None and not formula.refused:
            found = self._few_layers.simulated(recipe, timed=timed)
            if found is not None:
                times = {timed_on(device): found.times[device.name] for device in self.devices if found.times}
                formula.learn(found.log, found.profile, found.labels, times, whole=False)
                return save(formula)
        return self.simulated(recipe)

    def simulated(self, recipe: Recipe) -> None:
        """Simulate at these sizes now, with all layers. Raises CannotDivide, as it did before."""
        formula = self.formula(recipe)
        if formula.refused:
            raise CannotDivide(formula.refused)
        from harness.simulate import simulate_for_devices

        which = f"rank 0 of {recipe.world_size} " if recipe.world_size > 1 else ""
        rows = counted(recipe.micro_batch_size, recipe.unit)
        self.told(f"simulating {which}on {self.hardware.name}: {rows} of {recipe.seq_len:,} tokens")
        try:
            profile, memory, times = simulate_for_devices(recipe, self.devices, self.settings)
        except CannotDivide as error:
            formula.refused, formula.changed = str(error), True
            raise
        else:
            by_device = {timed_on(device): times[device.name] for device in self.devices}
            formula.learn(memory.log, profile, memory.labels(), by_device)
        finally:
            save(formula)


def all_at_once(asked: Iterable[tuple[Simulations, Recipe]]) -> None:
    """Simulate what is not kept yet in as many processes as there are cores. They leave it in the cache,
    where other Simulations find it; where they cannot, it is simulated in the process that asks for it. Where
    a thread runs, forking is not safe."""
    waiting = [(simulations, recipe) for simulations, recipe in asked if not simulations.is_timed(recipe)]
    if len(waiting) < 2 or not _may_fork():
        return
    cores = len(os.sched_getaffinity(0))
    from harness.simulate import import_everything

    for _, recipe in waiting:
        import_everything(recipe)
    fork = get_context("fork").Process
    processes = [fork(target=_leave, args=(waiting[n::cores],)) for n in range(cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def both_at_once(simulations: Simulations, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """What two searches find: the second in a process of its own, where that is possible, which tells
    `simulations` what it learned. Raises what they raise."""
    if not _may_fork():
        return first(), second()
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def other() -> None:
        try:
            theirs.send((second(), simulations.learned))
        except Exception as error:  # raised where the answer is waited for
            theirs.send((error, {}))

    process = context.Process(target=other)
    process.start()
    theirs.close()
    try:
        found = first()
        answer, learned = ours.recv()
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if isinstance(answer, Exception):
        raise answer
    simulations.merge(learned)
    return found, answer


def _may_fork() -> bool:
    """Whether there are two cores, and no thread that a fork would leave with a lock."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return cores > 1 and threading.active_count() == 1


def _leave(share: list[tuple[Simulations, Recipe]]) -> None:
    """For another process, which finds each in the cache, or finds out why it cannot be simulated."""
    for simulations, recipe in share:
        with suppress(InputError):
            simulations.timed(recipe)
