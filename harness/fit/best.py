"""For each card the micro batch and the toggles with which it is fastest: `harness hardware --best`.

A card costs the same whatever it runs, so that the fastest is also the cheapest a token. Two simulations of
each variant say how time and memory grow with the rows; what looks fastest on a card is then simulated at its
own sizes, until something is seen to fit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.changes import WORTHWHILE, by_arithmetic, changed, overrides
from harness.fit.offers import UNSURE, Offer, simulated
from harness.fit.simulations import Simulations, all_at_once
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
"""Less memory, or less time."""
ENOUGH_TOKENS = 2**14
"""In a micro batch: with twice as many no kernel is faster a token. Of Llama-3.1-8B LoRA a simulated H100 has
5,638, 5,678, 5,691 and 5,691 tokens/s with 1, 2, 4 and 8 rows of 4,096."""
WORTH_CHANGING = 0.02
"""Of the speed: for less than that a recipe is not changed."""


@dataclass(frozen=True)
class _Try:
    """What may be the best on a device. Its numbers are guessed between two sizes that were simulated."""

    recipe: Recipe
    changes: tuple[int, bool, int]
    """How far it is from the recipe that was asked for: toggles, whether the rows are others, the rows."""
    tokens_per_s: float
    least_bytes: float
    """Without which it does not fit."""


def best_offers(
    recipe: Recipe, kinds: Sequence[list[Hardware]], told: Callable[[str], None] = lambda line: None
) -> list[Offer]:
    """Of each device its best, seen to fit by a simulation of these very sizes; of one that nothing fits,
    what the least of all takes.

    `kinds`: devices that run the same kernels, together. There are no offers of those that nothing can be
    simulated for.
    """
    searches = [_Search(recipe, alike, told) for alike in kinds]
    for end in (0, -1):  # one after the other: both ends of a variant are kept in one file
        all_at_once((search.simulations(), sizes[end]) for search in searches for sizes in search.variants)
    return [offer for search in searches for offer in search.offers()]


class _Search:
    """Among the variants of a recipe, on devices that run the same kernels."""

    def __init__(self, recipe: Recipe, alike: list[Hardware], told: Callable[[str], None]) -> None:
        self.recipe, self.alike = recipe, alike
        self.simulations = lambda: Simulations(alike[0], told=told, alike=alike[1:])
        """New ones know what others have left in the cache."""
        self.variants = list(self._variants())
        """Each from one row to as many as are enough, or as may fit the largest device."""

    def _variants(self) -> Iterator[list[Recipe]]:
        needs = _needs(self.recipe, self.alike[0])
        largest = max(device.memory_bytes for device in self.alike)
        enough = max(ENOUGH_TOKENS // self.recipe.seq_len, 1)
        rows = sorted({*(2**n for n in range(enough.bit_length())), self.recipe.micro_batch_size})
        for fields in _toggles(self.recipe, needs):
            with suppress(ValidationError, InputError):
                variant = changed(self.recipe, fields)
                sizes = [variant.model_copy(update={"micro_batch_size": number}) for number in rows]
                may_fit = [one for one in sizes if needs(one) * (1 - UNSURE) <= largest]
                if may_fit or not fields:
                    yield may_fit or sizes[:1]

    def offers(self) -> Iterator[Offer]:
        """The best of each device."""
        simulations = self.simulations()
        known = [sizes for sizes in self.variants if _can_be_simulated(sizes, simulations)]
        if known:
            yield from (_Best(self.recipe, device, simulations).among(known) for device in self.alike)
            simulations.keep()


def _can_be_simulated(sizes: list[Recipe], simulations: Simulations) -> bool:
    try:
        for end in (sizes[0], sizes[-1]):
            simulations.timed(end)
    except InputError:
        return False
    return True


class _Best:
    """The search for the best of one device."""

    def __init__(self, recipe: Recipe, device: Hardware, simulations: Simulations) -> None:
        self.recipe, self.device, self.simulations = recipe, device, simulations

    def among(self, variants: list[list[Recipe]]) -> Offer:
        """The fastest that fits, or one that is nearly as fast with fewer changes."""
        tries = [one for sizes in variants for one in self._tries(sizes)]
        may_fit = [one for one in tries if one.least_bytes <= self.device.memory_bytes]
        if not may_fit:
            return self._offer(min(tries, key=lambda one: one.least_bytes))
        best = self._first_that_fits(sorted(may_fit, key=lambda one: -one.tokens_per_s))
        enough = (best.tokens_per_s or 0) * (1 - WORTH_CHANGING)
        alike = [one for one in may_fit if one.tokens_per_s >= enough]
        simplest = self._first_that_fits(sorted(alike, key=lambda one: one.changes))
        roomy = simplest.fits and (best.tight or not simplest.tight)
        return simplest if roomy and (simplest.tokens_per_s or 0) >= enough else best

    def _first_that_fits(self, tries: list[_Try]) -> Offer:
        """The first that fits with something to spare; or else that fits; or else any. `tries`: some."""
        offers: list[Offer] = []
        for one in tries:
            offers.append(self._offer(one))
            if offers[-1].fits and not offers[-1].tight:
                return offers[-1]
        return next((offer for offer in offers if offer.fits), offers[-1])

    def _tries(self, sizes: list[Recipe]) -> Iterator[_Try]:
        """One variant by rows: seconds and bytes are nearly straight lines between its ends."""
        ends = sizes[0], sizes[-1]
        plenty = with_memory(self.device, PLENTY_BYTES)
        speeds = [self.simulations.on(plenty, end).step.tokens_per_s or 1.0 for end in ends]
        seconds = [end.global_tokens_per_step / speed for end, speed in zip(ends, speeds, strict=True)]
        least = [self.simulations.least_bytes(end) or 0 for end in ends]
        first, last = (end.micro_batch_size for end in ends)
        for recipe in sizes:
            rows = recipe.micro_batch_size
            share = (rows - first) / (last - first) if last > first else 0.0
            after_s, needed = (low + share * (high - low) for low, high in (seconds, least))
            fields = recipe.model_dump()
            toggles = sum(value != fields[name] for name, value in self.recipe.model_dump().items())
            other = rows != self.recipe.micro_batch_size
            changes = toggles - other, other, rows
            yield _Try(recipe, changes, recipe.global_tokens_per_step / after_s, needed)

    def _offer(self, one: _Try) -> Offer:
        self.simulations.timed(one.recipe)
        fields = one.recipe.model_dump() | {"micro_batch_size": self.recipe.micro_batch_size}
        return replace(
            simulated(one.recipe, self.device, self.simulations),
            overrides=overrides(self.recipe, fields),
            micro_batch_size=one.recipe.micro_batch_size,
        )


def _toggles(recipe: Recipe, needs: Callable[[Recipe], int]) -> Iterator[dict[str, Any]]:
    """Nothing, and all that is free and saves something; both with checkpointing and without."""
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
