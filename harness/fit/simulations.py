"""The simulations of recipes on one device, each made once. No torch is imported until one has to run.

A simulation runs with plenty of memory, and its requests are kept as a formula (harness/formula). So sizes
between simulated ones, less memory and other allocator settings need no further simulation.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from harness.allocator import Settings, parse_settings
from harness.errors import CannotDivide, InputError
from harness.fit.changes import Price, Pricing, overrides
from harness.fit.few_layers import FewLayers
from harness.formula import Formula, NotRepeated, Piece, kept_bytes, load, point_of, save, timed_on
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.recipe import Recipe
from harness.step_profile import StepProfile
from harness.system import installed_version
from harness.units import counted, in_gib

A = TypeVar("A")
B = TypeVar("B")


class Simulations:
    """Profiles of recipes on `hardware` by simulation, which is skipped where a formula is exact.

    `settings` are the allocator's (None: the defaults). `told` is called with a line before each simulation.
    `formulas` are those already known, by recipe. `alike` are devices that run the same kernels as
    `hardware`, so that one simulation gives the step's time on each. With `few_layers` a model whose layers
    repeat is simulated with few of them.
    """

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
        """All devices on which a simulation times the step; the first is `hardware`."""
        self.settings = settings or parse_settings("", installed_version("torch") or "")
        self.told = told
        self._formulas: dict[str, Formula] = {} if formulas is None else formulas
        self._profiles: dict[tuple[Recipe, int], StepProfile] = {}
        self._few_layers = FewLayers(self.devices, self.settings) if few_layers else None
        """None where all layers are simulated."""

    def with_settings(self, settings: Settings) -> Simulations:
        """The same formulas with other allocator settings."""
        other = Simulations(self.hardware, settings, self.told, self._formulas, self.devices[1:])
        other._few_layers = self._few_layers
        return other

    def formula(self, recipe: Recipe) -> Formula:
        """The recipe's formula, which is that of all its sizes. What is learned is added to it."""
        name = _without_sizes(recipe)
        if name not in self._formulas:
            self._formulas[name] = load(recipe, self.hardware)
            if self._few_layers is None:
                self._formulas[name].forget_few_layers()
        return self._formulas[name]

    def profile(self, recipe: Recipe) -> StepProfile:
        """The profile of a step on `hardware`, with `oom` filled where memory runs out. It is exact, and
        simulated if need be. Raises InputError if it cannot be simulated."""
        self._learn(recipe)
        return self._profile(recipe, self.hardware)

    def with_plenty(self, recipe: Recipe) -> StepProfile:
        """Like `profile`, with plenty of memory: what the recipe takes if memory does not run out."""
        self._learn(recipe)
        return self._profile(recipe, with_memory(self.hardware, PLENTY_BYTES))

    def timed(self, recipe: Recipe) -> StepProfile:
        """Like `with_plenty`, with the step's times on `hardware`, of a simulation at these very sizes."""
        self.time(recipe)
        return self.with_plenty(recipe)

    def time(self, recipe: Recipe) -> None:
        """Simulate at these very sizes unless that was done: no formula gives the time at other sizes."""
        if not self.is_timed(recipe):
            self.simulate(recipe, timed=True)
            self._profiles.clear()

    def is_timed(self, recipe: Recipe) -> bool:
        """Whether `time` needs no simulation."""
        formula = self.formula(recipe)
        timed = self.knows(recipe) and formula.has_times(recipe, self.devices)
        return timed or bool(formula.refused)

    def on(self, device: Hardware, recipe: Recipe) -> StepProfile:
        """The profile of a step on `device`, one of `devices`, with its own memory."""
        self._learn(recipe)
        return self.formula(recipe).profile(recipe, device, self.settings)

    def fits(self, device: Hardware, recipe: Recipe) -> bool:
        """Whether a step fits on `device`, one of `devices`."""
        self._learn(recipe)
        return self.formula(recipe).fits(recipe, device, self.settings)

    def expected(self, recipe: Recipe) -> StepProfile | None:
        """The profile by the formula, exact or a guess, and never simulated; None where no formula holds."""
        return None if self.least_bytes(recipe) is None else self._profile(recipe, self.hardware)

    def knows(self, recipe: Recipe) -> bool:
        """Whether `profile` needs no simulation."""
        return self.formula(recipe).knowing(point_of(recipe)) is not None

    def can_cut(self, recipe: Recipe) -> bool:
        """Whether the recipe is simulated with few layers, unless these show that they do not repeat."""
        return self._few_layers is not None and self._few_layers.model(recipe) is not None

    def simulated_before(self, recipe: Recipe, field: str) -> list[int]:
        """The values of `field` (micro_batch_size or seq_len) at which the recipe was simulated, with the
        other of the two as it is in `recipe`."""
        here, points = point_of(recipe)._asdict(), self.formula(recipe).simulated_at()
        others = {name: value for name, value in here.items() if name != field}
        return [point._asdict()[field] for point in points if others.items() <= point._asdict().items()]

    def explains(self, recipe: Recipe) -> bool:
        """Whether the formula is exact at these sizes, and has expressions that may hold at others too."""
        piece = self.formula(recipe).knowing(point_of(recipe))
        return piece is not None and piece.explains

    def least_bytes(self, recipe: Recipe) -> int | None:
        """The bytes of memory without which the step cannot fit, by the formula, exact or a guess, with the
        CUDA context; None where no formula holds."""
        found = self.formula(recipe).least_bytes(point_of(recipe))
        return None if found is None else found + self.hardware.calibration.cuda_context_bytes

    def kept_bytes(self, recipe: Recipe) -> int:
        """The bytes that stay on the device from step to step, with the CUDA context."""
        self._learn(recipe)
        log = self.formula(recipe).requests(point_of(recipe))
        assert log is not None
        return kept_bytes(log) + self.hardware.calibration.cuda_context_bytes

    @property
    def learned(self) -> dict[str, Formula]:
        """The formulas by recipe, which `merge` takes in from another process."""
        return self._formulas

    def merge(self, learned: dict[str, Formula]) -> None:
        """Add what another process learned."""
        for name, formula in learned.items():
            known = self._formulas.setdefault(name, formula)
            if known is not formula:
                known.merge(formula)

    def keep(self) -> None:
        """Write changed formulas to the cache, for later questions."""
        for formula in self._formulas.values():
            save(formula)

    def _profile(self, recipe: Recipe, hardware: Hardware) -> StepProfile:
        """The profile by the formula. One that is exact is computed once."""
        key = recipe, hardware.memory_bytes
        if key not in self._profiles:
            found = self.formula(recipe).profile(recipe, hardware, self.settings)
            if not self.knows(recipe):
                return found
            self._profiles[key] = found
        return self._profiles[key]

    def _learn(self, recipe: Recipe) -> None:
        """Simulate at these sizes, unless the formula is exact there."""
        if not self.knows(recipe):
            self.simulate(recipe)

    def confirm(self, recipe: Recipe) -> None:
        """Simulate the model with all of its layers, unless that was done, to see that it makes the requests
        that were derived from few layers, at these sizes or at others. Raises NotRepeated where it does not.
        """
        formula, point = self.formula(recipe), point_of(recipe)
        known = formula.knowing(point)
        expected = known or formula.guessing(point)
        if self._few_layers is None or expected is None or expected.knows_whole(point):
            return
        self.simulated(recipe)
        self._profiles.clear()
        if not expected.knows_whole(point) and (known or not self._is_derived(recipe)):
            raise NotRepeated(f"{recipe.model} has layers that do not repeat")

    def _is_derived(self, recipe: Recipe) -> bool:
        """Whether few layers make the same requests as all of them, which were simulated, at these sizes."""
        few = self._few_layers and self._few_layers.simulated(recipe, timed=False)
        whole, point = self.formula(recipe).knowing(point_of(recipe)), point_of(recipe)
        return bool(few and whole and whole.add(Piece.of(few.log, point, whole=False)))

    def simulate(self, recipe: Recipe, *, timed: bool = False) -> None:
        """Simulate at these sizes: with few layers where that is wanted and possible, otherwise with all."""
        formula = self.formula(recipe)
        if self._few_layers is not None and self.can_cut(recipe) and not formula.refused:
            self._tell("few layers ", recipe)
            at_once = partial(in_two_processes, simulated=recipe)
            found = self._few_layers.simulated(recipe, timed=timed, at_once=at_once)
            if found is not None:
                times = {timed_on(device): found.times[device.name] for device in self.devices if found.times}
                formula.learn(found.log, found.profile, found.labels, times, whole=False)
                return save(formula)
        return self.simulated(recipe)

    def _tell(self, what: str, recipe: Recipe) -> str:
        """Tell that `what` is simulated, and return the recipe's sizes in words."""
        sizes = f"{counted(recipe.micro_batch_size, recipe.unit)} of {recipe.seq_len:,} tokens"
        self.told(f"simulating {what}on {self.hardware.name}: {sizes}")
        return sizes

    def simulated(self, recipe: Recipe) -> None:
        """Simulate at these sizes with all layers. Raises CannotDivide, at once if it was raised before."""
        formula = self.formula(recipe)
        if formula.refused:
            raise CannotDivide(formula.refused)
        from harness.simulate import simulate_for_devices

        which = f"rank 0 of {recipe.world_size} " if recipe.world_size > 1 else ""
        sizes = self._tell(which, recipe)
        try:
            profile, memory, times = simulate_for_devices(recipe, self.devices, self.settings)
        except CannotDivide as error:
            formula.refused, formula.changed = str(error), True
            raise
        else:
            if not memory.log.has_step:
                raise InputError(
                    f"the inputs of {sizes} alone are larger than "
                    f"{self.hardware.name}. Give a smaller micro_batch_size or seq_len."
                )
            by_device = {timed_on(device): times[device.name] for device in self.devices}
            formula.learn(memory.log, profile, memory.labels(), by_device)
        finally:
            save(formula)


def simulations_on(
    devices: Sequence[Hardware], told: Callable[[str], None], *, few_layers: bool = False
) -> Simulations:
    """Simulations on the first of `devices`, which time the step on all of them."""
    return Simulations(devices[0], told=told, alike=devices[1:], few_layers=few_layers)


def few_layers_first(search: Callable[[bool], A]) -> A:
    """What `search` finds with few layers; where a model's layers do not repeat, with all of them."""
    try:
        return search(True)
    except NotRepeated:
        return search(False)


def all_at_once(wanted: Iterable[tuple[Simulations, Recipe]]) -> None:
    """Simulate recipes whose times are not known yet, in as many processes as there are cores.

    The processes leave the formulas in the cache, where other Simulations find them. Sizes of one recipe on
    the same devices, which are kept in one formula, are simulated in one process: of two, each would write
    over what the other found. Where the cache cannot be written to, or there is one core, or another thread
    runs, so that forking is not safe, each recipe is simulated later instead, by whoever asks for its
    profile.
    """
    waiting = [(simulations, recipe) for simulations, recipe in wanted if not simulations.is_timed(recipe)]
    if len(waiting) < 2 or not _may_fork():
        return
    together: dict[Any, list[tuple[Simulations, Recipe]]] = {}
    for simulations, recipe in waiting:
        one = (tuple(device.name for device in simulations.devices), _without_sizes(recipe))
        same = together.setdefault(one, [])
        same.append((same[0][0] if same else simulations, recipe))
    shares: list[list[tuple[Simulations, Recipe]]] = [[] for _ in os.sched_getaffinity(0)]
    for same in sorted(together.values(), key=len, reverse=True):
        min(shares, key=len).extend(same)
    from harness.simulate import import_everything

    for _, recipe in waiting:
        import_everything(recipe)
    fork = get_context("fork").Process
    processes = [fork(target=_simulate_into_cache, args=(share,)) for share in shares if share]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _without_sizes(recipe: Recipe) -> str:
    """What all sizes of a recipe have in common."""
    return recipe.model_copy(update={"micro_batch_size": 1, "seq_len": 1}).model_dump_json()


def by_simulation(recipe: Recipe, simulations: Simulations, told: Callable[[str], None]) -> Pricing:
    """A function that prices changes of `recipe` by simulating them, and tells what each needs."""
    prices: dict[str, Price] = {}

    def price(other: Recipe) -> Price:
        changes = overrides(recipe, other.model_dump())
        if changes not in prices:
            profile = simulations.timed(other)
            peak_bytes = profile.memory.peak_allocated_bytes or 0
            needed = peak_bytes + simulations.hardware.calibration.cuda_context_bytes
            prices[changes] = Price(needed, profile.step.tokens_per_s or 0.0)
            told(f"{changes or 'as it is'}: needs {in_gib(needed)}")
        return prices[changes]

    return price


def both_at_once(
    simulations: Simulations,
    first: Callable[[], A],
    second: Callable[[], B],
    simulated: Recipe | None = None,
) -> tuple[A, B]:
    """The results of two searches that both use `simulations`. Where possible the second runs in a process of
    its own, and `simulations` then takes in what that learned. What a simulation of `simulated` imports is
    imported once, for both. Raises what the searches raise."""
    found, (answer, learned) = in_two_processes(first, lambda: (second(), simulations.learned), simulated)
    simulations.merge(learned)
    return found, answer


def in_two_processes(
    first: Callable[[], A], second: Callable[[], B], simulated: Recipe | None = None
) -> tuple[A, B]:
    """The results of both, the second from a process of its own where that is possible. See both_at_once."""
    if not _may_fork():
        return first(), second()
    if simulated is not None:
        from harness.simulate import import_everything

        with suppress(InputError):  # the simulations find out what cannot be simulated, and why
            import_everything(simulated)
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run_second() -> None:
        try:
            theirs.send((second(), None))
        except Exception as error:  # raised where the answer is waited for
            theirs.send((None, error))

    process = context.Process(target=run_second)
    process.start()
    theirs.close()
    try:
        found = first()
        answer, error = ours.recv()
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if error is not None:
        raise error
    return found, answer


def _may_fork() -> bool:
    """Whether there are two cores that no process beside this one works on, and no other thread, whose locks
    a forked process would inherit."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" and parent_process() is None else 1
    return cores > 1 and threading.active_count() == 1


def _simulate_into_cache(share: list[tuple[Simulations, Recipe]]) -> None:
    """Simulate the recipes and leave their formulas in the cache. One that cannot be simulated is passed
    over, since the process that needs it will find out why."""
    for simulations, recipe in share:
        with suppress(InputError):
            simulations.timed(recipe)
            simulations.keep()
