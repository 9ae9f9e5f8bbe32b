"""The largest micro batch and sequence that fit in a simulation, and what to change when none does.

The formula of a few simulated steps says where to look, and a simulated step decides (fit/exact.py). For a
recipe that cannot be simulated the answer is arithmetic's (fit/search.py), which also prices changes.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from pydantic import ValidationError

from harness.allocator import Settings
from harness.architecture import load_shape, num_parameters
from harness.errors import InputError
from harness.fit.changes import Change, Pricing, by_arithmetic, changed, combined, overrides, suggestions
from harness.fit.exact import ExactFit, fit_exact, fits_beyond
from harness.fit.held_back import HeldBack, NeutralChange, held_back, neutrally_changed, with_neutral_change
from harness.fit.search import (
    DEFAULT_MARGIN,
    MULTIPLES,
    Fit,
    FitField,
    fit,
    largest_within,
    needs_of,
    usable_bytes,
)
from harness.fit.simulations import Simulations, both_at_once, by_simulation, few_layers_first
from harness.hardware import Hardware
from harness.recipe import Recipe, on_more_ranks
from harness.step_profile import StepProfile, verdict
from harness.system import collected_by_hand

SEEN_TO_FIT = 2
"""Changes of each group (those that keep the result, those that do not) are simulated until this many fit."""
MOST_COMBINATIONS = 4  # of changes, that are simulated
ROOM = 0.03  # of the memory: what leaves so much free by arithmetic is likely to fit in a simulation
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
MORE_RANKS = (2, 4, 8)  # multiples of the recipe's number of GPUs that are tried until one is enough


@dataclass
class ConfirmedFit:
    """The sizes that fit in simulations, with arithmetic's estimates, and changes that would help."""

    arithmetic: Fit | None
    """None for a model that napkin cannot estimate."""
    largest: dict[FitField, ExactFit] = field(default_factory=dict[FitField, ExactFit])
    """The largest value of each field by simulation. Empty where nothing could be simulated."""
    expandable: dict[FitField, ExactFit] = field(default_factory=dict[FitField, ExactFit])
    """The larger values that fit with expandable_segments:True, where that changes the answer."""
    changes: list[Change] = field(default_factory=list[Change])
    """Single changes that lower the memory that is needed, where the recipe does not fit."""
    together: str = ""
    """Overrides that fitted together in a simulation; by arithmetic alone where nothing was simulated."""
    together_expandable: str = ""
    """Overrides that fitted together with expandable segments alone, with the verdict in words; those in
    `together` are dearer. Empty if there are none."""
    wider: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether a recipe that does not fit does with expandable segments, and on more GPUs; by description."""
    num_parameters: int | None = None
    """The model's parameters, without an adapter; None where its config says too little."""
    notes: list[str] = field(default_factory=list[str])
    unsimulated: str = ""  # why nothing could be simulated; a run may be refused for the same reason
    held_back: HeldBack | None = None
    """Which memory keeps a larger micro batch from fitting; None where it is not known."""
    neutral: NeutralChange | None = None
    """A change that lets a larger micro batch fit and trains to the same weights; or None."""

    @classmethod
    def by_arithmetic(cls, fit: Fit) -> "ConfirmedFit":
        """The answer where nothing was simulated."""
        return cls(fit, changes=fit.changes, together=fit.together, num_parameters=fit.num_parameters)

    @property
    def seen(self) -> bool:
        """Whether anything was simulated."""
        return bool(self.largest)

    @property
    def fits_something(self) -> bool:
        """Whether any size fits."""
        if self.seen:
            return any(found.value for found in self.largest.values())
        return self.arithmetic is not None and bool(
            self.arithmetic.micro_batch_size or self.arithmetic.seq_len
        )


@collected_by_hand()  # formulas are a million numbers, searched for cycles again and again
def fit_confirmed(
    recipe: Recipe,
    hardware: Hardware,
    settings: Settings,
    *,
    margin: float = DEFAULT_MARGIN,
    told: Callable[[str], None] = lambda line: None,
) -> ConfirmedFit:
    """The largest sizes of `recipe` that fit `hardware`, and changes that help where it does not fit.

    Where arithmetic alone can answer, it leaves the fraction `margin` of the memory free. `told` is called
    with a line about the outcome of each simulation. Raises InputError where neither can answer.
    """
    usable_bytes(hardware, margin)
    try:
        arithmetic, unknown = fit(recipe, hardware, margin=margin), None
    except InputError as error:
        arithmetic, unknown = None, error
    confirming = partial(_Confirming, recipe, hardware, settings, arithmetic, unknown, told)
    return few_layers_first(lambda few: confirming(few_layers=few).answer())


@dataclass
class _Confirming:
    """Simulates what arithmetic proposes, and writes what it sees into `found`."""

    recipe: Recipe
    hardware: Hardware
    settings: Settings
    arithmetic: Fit | None
    unknown: InputError | None  # why there is no arithmetic
    told: Callable[[str], None]
    few_layers: bool  # whether models are simulated with few of their layers (fit/few_layers.py)

    def __post_init__(self) -> None:
        self.found = ConfirmedFit.by_arithmetic(self.arithmetic) if self.arithmetic else ConfirmedFit(None)
        self.simulations = Simulations(self.hardware, self.settings, few_layers=self.few_layers)
        self._enough: Recipe | None = None
        """A changed recipe that fitted in a simulation, where the recipe itself does not fit."""

    def answer(self) -> ConfirmedFit:
        """Search around what arithmetic proposes. Raises NotRepeated as Simulations.confirm does, and
        InputError where there is no arithmetic and no simulation."""
        found = self.found
        with suppress(InputError):
            found.num_parameters = num_parameters(load_shape(self.recipe.model), self.recipe.head_outputs)
        try:
            self.sizes()
        except InputError as error:
            if self.arithmetic is None:
                raise
            found.unsimulated = f"by arithmetic alone, because it cannot be simulated: {error}"
            return found
        if self.unknown is not None:
            found.notes.append(f"by simulation alone: {self.unknown}")
        self.what_holds_it_back()
        self.what_to_change()
        if not any(exact.value for exact in found.largest.values()):
            self.simulations.confirm(self._enough or self.recipe)
        self.simulations.keep()
        return found

    def sizes(self) -> None:
        """Find the largest value of both fields, and whether expandable segments would allow a larger one."""
        self._begin()
        axes = both_at_once(
            self.simulations, lambda: self._along("micro_batch_size"), lambda: self._along("seq_len")
        )
        for name, (largest, expandable) in zip(MULTIPLES, axes, strict=True):
            self.found.largest[name] = largest
            if expandable is not None:
                self.found.expandable[name] = expandable

    def _begin(self) -> None:
        """Simulate the recipe, where both searches begin, and sizes a little beyond what fits by arithmetic,
        or the shortest sequence where the recipe does not fit: between them the formula knows the limit."""
        simulations, recipe, step = self.simulations, self.recipe, self._step("seq_len")
        if simulations.knows(recipe):
            return
        rows, tokens = self._a_little_more("micro_batch_size"), self._a_little_more("seq_len")
        others: list[dict[str, int]] = [{"seq_len": step}]
        fitting = [c for c in self.found.changes if c.required_bytes <= self.hardware.memory_bytes]
        if fitting and not tokens:  # it surely does not fit: what it takes is asked for
            return self._simulate_changes(fitting, [recipe, recipe.model_copy(update=others[0])])
        if tokens > recipe.seq_len:
            # odd numbers of steps: what is derived from them holds at every one (Piece.sequence_step)
            middle, longest = ((tokens // step + 1) // part * 2 - 1 for part in (4, 2))
            others = [{"seq_len": longest * step}, {"seq_len": middle * step}][: 1 + self.few_layers]
        first = [recipe]
        if simulations.can_cut(recipe):
            with suppress(InputError):  # the search finds out later why
                simulations.profile(recipe)
            first = []
        if self.few_layers and rows > recipe.micro_batch_size:
            # a micro batch of one row makes other requests than all others, since it needs no masks
            micro_batches = [rows, 2] if recipe.micro_batch_size == 1 else [rows]
            first += [recipe.model_copy(update={"micro_batch_size": n}) for n in micro_batches]
        self._simulate(first, [recipe.model_copy(update=other) for other in others])

    def _a_little_more(self, name: FitField) -> int:
        """A value of the field that is 9/8 of the largest that fits by arithmetic; 0 without arithmetic."""
        if self.found.arithmetic is None:
            return 0
        needs = needs_of(self.recipe, self.hardware, name, shape := load_shape(self.recipe.model))
        return largest_within(self.hardware.memory_bytes, needs, name, shape) * 9 // 8

    def _simulate(
        self, first: list[Recipe], second: list[Recipe], *, timed: bool = False, whole: Recipe | None = None
    ) -> None:
        """Simulate both lists, in two processes: with their times if `timed`, and `whole` with all layers.
        The search finds out later what cannot be simulated."""

        def simulate(recipes: list[Recipe]) -> None:
            for recipe in recipes:
                with suppress(InputError):
                    if recipe is whole:
                        self.simulations.simulated(recipe)
                    if timed:
                        self.simulations.timed(recipe)
                    self.simulations.profile(recipe)

        both_at_once(self.simulations, lambda: simulate(first), lambda: simulate(second), self.recipe)

    def _along(self, name: FitField) -> tuple[ExactFit, ExactFit | None]:
        """The largest value of a field, and a larger one with expandable segments, where there is one and
        memory ran out only by fragmentation."""
        largest = fit_exact(
            self.recipe,
            self.simulations,
            name,
            multiple_of=self._step(name),
            told=lambda value, fits: self._tell(f"{name}={value}", fits),
        )
        oom = largest.next_profile.oom if largest.next_profile is not None else None
        if oom is None or self.settings.expandable_segments:
            return largest, None
        left = (oom.reserved_unallocated_bytes or 0) + (oom.free_bytes or 0)
        if left < (oom.requested_bytes or 0):
            return largest, None
        larger = fits_beyond(
            self.recipe,
            self.simulations.with_settings(replace(self.settings, expandable_segments=True)),
            largest,
            lambda value, fits: self._tell(f"{name}={value} with expandable_segments:True", fits),
        )
        return largest, larger if larger.value is not None else None

    def _step(self, name: FitField) -> int:
        """The step between tried values. For a long sequence, about its 64th part, in powers of two."""
        step, expected = MULTIPLES[name], self.arithmetic
        if name == "seq_len":
            tokens = expected.seq_len if expected is not None else self.recipe.seq_len
            while step * 128 <= tokens:
                step *= 2
        return step

    def what_holds_it_back(self) -> None:
        """Find which memory keeps a larger micro batch from fitting, and whether a neutral change helps."""
        rows = self.found.largest["micro_batch_size"].value
        recipe = self.recipe.model_copy(update={"micro_batch_size": rows or self.recipe.micro_batch_size})
        held = held_back(recipe, self.simulations)
        if held is None:
            return
        self.found.held_back = held
        if not held.logits:
            return
        changed_recipe = neutrally_changed(recipe)
        if changed_recipe and recipe.micro_batch_size == 1 and not self.simulations.knows(changed_recipe):
            # the search with the change begins with one row and with two, which differ
            two_rows = changed_recipe.model_copy(update={"micro_batch_size": 2})
            self._simulate([changed_recipe], [two_rows], timed=True)
        other = with_neutral_change(recipe, self.simulations)
        if other is not None and other.micro_batch_size > (rows or 0):
            self.found.neutral = other
            self._tell(f"{other.overrides} micro_batch_size={other.micro_batch_size}", True)

    def what_to_change(self) -> None:
        """Where the recipe does not fit: find single changes, and the fewest together, with which it does,
        and see whether it fits as it is with expandable segments, or on more GPUs."""
        rows = self.found.largest["micro_batch_size"].value or 0
        if rows >= self.recipe.micro_batch_size:
            self.found.changes, self.found.together = [], ""
            return
        if self.arithmetic is not None:
            price = by_arithmetic(self.hardware, load_shape(self.recipe.model))
        else:
            price = by_simulation(self.recipe, self.simulations, self.told)
        limit = min(self.hardware.memory_bytes, price(self.recipe).required_bytes - 1)  # it does not fit
        changes = suggestions(self.recipe, limit, price)
        self.found.changes = self._simulated(changes)
        self.found.together = self._together(changes, limit, price)
        wider = self.found.wider
        if not self.settings.expandable_segments:
            wider[EXPANDABLE] = self._with_expandable(self.recipe) is not None
        for times in MORE_RANKS if self.recipe.distributed else ():
            with suppress(InputError):
                more = on_more_ranks(self.recipe, times)
                what = f"{more.world_size} GPUs ({overrides(self.recipe, more.model_dump())})"
                wider[what] = self.simulations.profile(more).oom is None
                self._tell(what, wider[what])
                if wider[what]:
                    return

    def _simulated(self, changes: list[Change]) -> list[Change]:
        """The changes, with a simulation's numbers for the first of each group that fit by arithmetic."""
        self._simulate_changes([change for change in changes if change.fits], [self.recipe])
        found: list[Change] = []
        for change in changes:
            fitting = sum(c.seen and c.fits for c in found if c.same_result == change.same_result)
            found.append(self._simulated_change(change) if change.fits and fitting < SEEN_TO_FIT else change)
        return found

    def _simulated_change(self, change: Change) -> Change:
        """The change with a simulation's numbers."""
        other = changed(self.recipe, change.fields)
        fits = self._fits(other) is None
        change = replace(change, fits=fits, seen=True)
        if not fits:
            return change
        self._enough = self._enough or other
        before, after = (self.simulations.timed(recipe) for recipe in (self.recipe, other))
        saved = (before.memory.peak_allocated_bytes or 0) - (after.memory.peak_allocated_bytes or 0)
        now, then = before.step.tokens_per_s, after.step.tokens_per_s
        return replace(change, saved_bytes=saved, slowdown=now / then if now and then else change.slowdown)

    def _simulate_changes(self, fitting: list[Change], others: list[Recipe]) -> None:
        """Simulate the recipe with each change that will be asked for, and `others`, in two processes. One
        that surely fits is simulated with all layers, since it will be confirmed so; that takes about as long
        as two others with few layers."""
        groups = [[change for change in fitting if change.same_result is same] for same in (True, False)]
        first = [change for group in groups for change in group[:SEEN_TO_FIT]]
        needs = [(changed(self.recipe, change.fields), change.required_bytes) for change in first]
        unknown = [(recipe, needed) for recipe, needed in needs if not self.simulations.knows(recipe)]
        room = self.hardware.memory_bytes * ROOM
        whole = next((r for r, needed in unknown if needed + room <= self.hardware.memory_bytes), None)
        cut = [recipe for recipe, _ in unknown if recipe != whole]
        if unknown:
            here = [*([whole] if whole else []), *cut[2:]]
            self._simulate(here, [*others, *cut[:2]], timed=True, whole=whole)

    def _together(self, changes: list[Change], limit: int, price: Pricing) -> str:
        """The overrides of the first combination of changes that fits in a simulation; empty if none does.
        Arithmetic proposes each, and leaves room for the memory that the one before lost to fragmentation."""
        for _ in range(MOST_COMBINATIONS):
            fields = combined(self.recipe, limit, changes, price)
            if not fields:
                break
            other = changed(self.recipe, fields)
            lost = self._fits(other)
            if lost is None:
                self._enough = other
                return overrides(self.recipe, fields)
            if lost and not self.found.together_expandable and (seen := self._with_expandable(other)):
                self.found.together_expandable = f"{overrides(self.recipe, fields)}: {verdict(seen)}"
            limit -= max(lost, self.hardware.memory_bytes // 100)
        return next((change.overrides for change in self.found.changes if change.seen and change.fits), "")

    def _fits(self, recipe: Recipe) -> int | None:
        """None if a simulation of `recipe` fits; else the reserved bytes that were idle when it ran out."""
        try:
            oom = self.simulations.profile(recipe).oom
        except (InputError, ValidationError):  # what this device or library cannot do
            return 0
        self._tell(overrides(self.recipe, recipe.model_dump()), oom is None)
        return None if oom is None else oom.reserved_unallocated_bytes or 0

    def _with_expandable(self, recipe: Recipe) -> StepProfile | None:
        """A simulation of `recipe` with expandable segments that fits; None where they are set already."""
        if self.settings.expandable_segments:
            return None
        settings = replace(self.settings, expandable_segments=True)
        profile = self.simulations.with_settings(settings).profile(recipe)
        return profile if profile.oom is None else None

    def _tell(self, what: str, fits: bool) -> None:
        self.told(f"{what}: {'fits' if fits else 'does not fit'}")
