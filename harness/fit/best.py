"""For each card the micro batch and the toggles with which it is fastest: `harness hardware --best`.

A card costs the same whatever it runs, so that the fastest is also the cheapest a token. Two simulations of
each variant with few layers, on one card and timed on all, say about how time and memory grow with the rows;
what looks fastest on a card is then simulated at its own sizes on that card, until something is seen to fit.
One of each variant that is chosen is simulated with all layers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.changes import WORTHWHILE, by_arithmetic, changed, overrides
from harness.fit.offers import UNSURE, Offer, simulated
from harness.fit.simulations import (
    Simulations,
    all_at_once,
    few_layers_first,
    in_two_processes,
    simulations_on,
)
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.recipe import Recipe

FREE: tuple[dict[str, Any], ...] = (
    {"attention": "sdpa"},
    {"loss": "fused_linear"},
    {"optimizer_impl": "fused"},
)
"""They train the same weights to the same values, and are no slower."""
CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": False},
)
"""The first takes less memory, the second less time."""
ENOUGH_TOKENS = 2**14
"""Tokens in a micro batch with which kernels are as fast a token as they get: with LoRA of Llama-3.1-8B a
simulated H100 has 5,638, 5,678, 5,691 and 5,691 tokens/s with 1, 2, 4 and 8 rows of 4,096."""
FLASH_SINCE = 8.0
"""The compute capability with which flash attention begins. The kernels of all cards from there on take about
the same memory, so that a simulation of one card says about what another would need."""
WORTH_CHANGING = 0.02
"""The share of its speed that a change must bring, or the recipe stays as it is."""


@dataclass(frozen=True)
class _Try:
    """A recipe that may be the best on a device. Its speed and memory are guesses: they lie between those of
    two sizes that were simulated, perhaps on a card that runs other kernels."""

    recipe: Recipe
    changes: tuple[int, bool, int]
    """How far it is from the recipe that was asked for: toggles, whether the rows are others, the rows."""
    tokens_per_s: float
    least_bytes: float
    """Memory without which it does not fit, by the guess."""


def best_offers(
    recipe: Recipe, kinds: Sequence[list[Hardware]], told: Callable[[str], None] = lambda line: None
) -> list[Offer]:
    """Of each device its best, seen to fit by a simulation of these very sizes; of one that nothing fits,
    what the least of all takes.

    `kinds`: devices that run the same kernels, together. There are no offers of those that nothing can be
    simulated for.
    """
    new = [alike for alike in kinds if float(alike[0].datasheet.compute_capability) >= FLASH_SINCE]
    old = [alike for alike in kinds if alike not in new]

    def search(some: list[list[Hardware]]) -> list[Offer]:
        return few_layers_first(lambda few: _Search(recipe, some, told, few_layers=few).offers())

    return [offer for some in (new, old) if some for offer in search(some)]


class _Search:
    """The search among a recipe's variants, on kinds of devices whose kernels take about the same memory."""

    def __init__(
        self,
        recipe: Recipe,
        kinds: Sequence[list[Hardware]],
        told: Callable[[str], None],
        *,
        few_layers: bool,
    ) -> None:
        self.recipe, self.kinds, self.few_layers = recipe, kinds, few_layers
        self.devices = [device for alike in sorted(kinds, key=len, reverse=True) for device in alike]
        """All devices, those of the largest kind first. The variants are simulated on the first of all."""
        self.told = told
        self.chosen: dict[str, tuple[Simulations, Recipe]] = {}
        """By variant, one recipe that is the best of a device."""

    def offers(self) -> list[Offer]:
        """The best of each device. Raises NotRepeated as Simulations.confirm does."""
        variants = list(self._variants())
        ends = dict.fromkeys(sizes[end] for sizes in variants for end in (0, -1))
        all_at_once((simulations_on(self.devices, self.told, few_layers=True), size) for size in ends)
        guesses = simulations_on(self.devices, self.told, few_layers=True)
        known = [sizes for sizes in variants if _can_be_simulated(sizes, guesses)]
        if not known:
            return []
        for warning in guesses.with_plenty(known[0][0]).warnings:
            self.told(f"warning: {warning}")
        tries = {device.name: _tries(self.recipe, device, known, guesses) for device in self.devices}
        guesses.keep()
        all_at_once(
            (simulations_on(alike, self.told, few_layers=self.few_layers), wanted)
            for alike in self.kinds
            for wanted in dict.fromkeys(
                one.recipe for device in alike for one in _likely(device, tries[device.name])
            )
        )
        offers = list[Offer]()
        for alike in self.kinds:  # new simulations find what other processes left in the cache
            own = simulations_on(alike, self.told, few_layers=self.few_layers)
            for device in alike:
                with suppress(InputError):
                    offers.append(self._best(device, tries[device.name], own))
            own.keep()
        chosen = [*self.chosen.values()]
        in_two_processes(lambda: _confirm(chosen[::2]), lambda: _confirm(chosen[1::2]))
        return offers

    def _best(self, device: Hardware, tries: list[_Try], simulations: Simulations) -> Offer:
        """The fastest on the device that fits, or one that is nearly as fast with fewer changes."""

        def offer_of(one: _Try) -> Offer:
            simulations.timed(one.recipe)
            fields = one.recipe.model_dump() | {"micro_batch_size": self.recipe.micro_batch_size}
            return replace(
                simulated(one.recipe, device, simulations),
                overrides=overrides(self.recipe, fields),
                micro_batch_size=one.recipe.micro_batch_size,
            )

        def chosen(one: _Try, offer: Offer) -> Offer:
            self.chosen.setdefault(offer.overrides, (simulations, one.recipe))
            return offer

        def first_that_fits(some: list[_Try]) -> tuple[_Try, Offer]:
            """The first that fits with something to spare; or else that fits; or else any."""
            seen: list[tuple[_Try, Offer]] = []
            for one in some:
                seen.append((one, offer_of(one)))
                if seen[-1][1].fits and not seen[-1][1].tight:
                    return seen[-1]
            return next((pair for pair in seen if pair[1].fits), seen[-1])

        may_fit = _may_fit(device, tries)
        if not may_fit:
            least = _likely(device, tries)[0]
            return chosen(least, offer_of(least))
        best, offer = first_that_fits(may_fit)
        simpler, simplest = first_that_fits(_nearly_as_fast(best, may_fit))
        roomy = simplest.fits and (offer.tight or not simplest.tight)
        enough = (offer.tokens_per_s or 0) * (1 - WORTH_CHANGING)
        simple = roomy and (simplest.tokens_per_s or 0) >= enough
        return chosen(simpler, simplest) if simple else chosen(best, offer)

    def _variants(self) -> Iterator[list[Recipe]]:
        """The sizes of each variant: from one row to as many as are enough or may fit the largest device."""
        needs = _needs(self.recipe, self.devices[0])
        largest = max(device.memory_bytes for device in self.devices)
        enough = max(ENOUGH_TOKENS // self.recipe.seq_len, 1)
        rows = sorted({*(2**n for n in range(enough.bit_length())), self.recipe.micro_batch_size})
        for fields in _toggles(self.recipe, needs):
            with suppress(ValidationError, InputError):
                variant = changed(self.recipe, fields)
                sizes = [variant.model_copy(update={"micro_batch_size": number}) for number in rows]
                may_fit = [one for one in sizes if needs(one) * (1 - UNSURE) <= largest]
                if may_fit or not fields:
                    yield may_fit or sizes[:1]


def _confirm(chosen: Iterable[tuple[Simulations, Recipe]]) -> None:
    for simulations, recipe in chosen:
        simulations.confirm(recipe)


def _can_be_simulated(sizes: list[Recipe], simulations: Simulations) -> bool:
    try:
        for end in (sizes[0], sizes[-1]):
            simulations.timed(end)
    except InputError:
        return False
    return True


def _tries(
    recipe: Recipe, device: Hardware, variants: list[list[Recipe]], simulations: Simulations
) -> list[_Try]:
    """Every size of every variant, with its guesses: seconds and bytes grow nearly linearly with the rows."""
    plenty, tries = with_memory(device, PLENTY_BYTES), list[_Try]()
    beside = _libraries_bytes(device) - _libraries_bytes(simulations.hardware)
    for sizes in variants:
        ends = sizes[0], sizes[-1]
        speeds = [simulations.on(plenty, end).step.tokens_per_s or 1.0 for end in ends]
        seconds = [end.global_tokens_per_step / speed for end, speed in zip(ends, speeds, strict=True)]
        least = [simulations.least_bytes(end) or 0 for end in ends]
        first, last = (end.micro_batch_size for end in ends)
        for other in sizes:
            rows = other.micro_batch_size
            share = (rows - first) / (last - first) if last > first else 0.0
            after_s, needed = (low + share * (high - low) for low, high in (seconds, least))
            fields = other.model_dump()
            toggles = sum(value != fields[name] for name, value in recipe.model_dump().items())
            moved = rows != recipe.micro_batch_size
            tries.append(
                _Try(
                    other,
                    (toggles - moved, moved, rows),
                    other.global_tokens_per_step / after_s,
                    needed + beside,
                )
            )
    return tries


def _libraries_bytes(device: Hardware) -> int:
    return device.cublas_workspace_bytes + device.calibration.cuda_context_bytes


def _may_fit(device: Hardware, tries: list[_Try]) -> list[_Try]:
    """Those with enough memory by the guess, the fastest first."""
    small = [one for one in tries if one.least_bytes <= device.memory_bytes]
    return sorted(small, key=lambda one: -one.tokens_per_s)


def _nearly_as_fast(best: _Try, tries: list[_Try]) -> list[_Try]:
    """Those that are not much slower than `best`, with the fewest changes first."""
    enough = best.tokens_per_s * (1 - WORTH_CHANGING)
    return sorted((one for one in tries if one.tokens_per_s >= enough), key=lambda one: one.changes)


def _likely(device: Hardware, tries: list[_Try]) -> list[_Try]:
    """What the search for the best of a device begins with."""
    if not (fastest := _may_fit(device, tries)):
        return [min(tries, key=lambda one: one.least_bytes)]
    return [fastest[0], _nearly_as_fast(fastest[0], fastest)[0]]


def _toggles(recipe: Recipe, needs: Callable[[Recipe], int]) -> Iterator[dict[str, Any]]:
    """The fields to set for each variant: none, and all of FREE that save memory here; each of the two with
    gradient checkpointing and without."""
    free: dict[str, Any] = {}
    for fields in FREE:
        with suppress(ValidationError, InputError):
            other = changed(recipe, fields)
            saved = needs(recipe) - needs(other)
            if other != recipe and saved >= WORTHWHILE * needs(recipe):  # without arithmetic: always
                free |= fields
    other = next(fields for fields in CHECKPOINTING if overrides(recipe, fields))
    yield from ({}, other)
    if free:
        yield from (free, free | other)


def _needs(recipe: Recipe, device: Hardware) -> Callable[[Recipe], int]:
    """Bytes by arithmetic; 0 of a model that there is none for."""
    try:
        price = by_arithmetic(device, load_shape(recipe.model))
        price(recipe)
    except InputError:
        return lambda recipe: 0
    return lambda recipe: price(recipe).required_bytes
