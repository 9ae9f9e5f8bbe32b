"""What one device of the table does with a recipe, as it was simulated or by arithmetic. No torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from textwrap import wrap
from typing import Any

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.simulations import Simulations
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.napkin import Timing, estimate, required_bytes
from harness.recipe import Recipe, shortened
from harness.step_profile import is_tight
from harness.units import GIB

UNSURE = 0.25
"""How far arithmetic may be off, before a simulation is not worth its seconds."""


@dataclass(frozen=True)
class Offer:
    """What one device does with the recipe; times and costs are None where it cannot run it."""

    name: str
    title: str
    memory_bytes: int
    required_bytes: int | None
    fits: bool
    reason: str
    """Why it cannot run the recipe; empty when it can."""
    tokens_per_s: float | None = None
    bound: str | None = None
    price_per_hour: float | None = None
    tokens_per_s_range: tuple[float, float] | None = None
    """Between these, four times of five, as far as such kernels were ever measured; None by arithmetic."""
    tight: bool = False
    """It fits with so little to spare that what nobody counts decides (step_profile/in_words.py)."""
    overrides: str = ""
    """What costs nothing and makes it fit, or makes it fast: the offer is of the recipe with these."""
    slowdown: float | None = None
    """Time a token with those over that without, where the change is made so that it fits; None: unknown."""
    micro_batch_size: int | None = None
    """With which the device is at its best, where that was looked for; None: the recipe's own."""
    step_s: float | None = None
    step_parts_s: dict[str, float] = field(default_factory=dict[str, float])
    """What a step's seconds consist of (StepProfile.parts_of_time_s); empty by arithmetic."""

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Price of an hour over the tokens of an hour, times a million; None without either."""
        if self.price_per_hour is None or not self.tokens_per_s or not self.fits:
            return None
        return self.price_per_hour / (self.tokens_per_s * 3600) * 1e6

    def hours(self, tokens: int) -> float | None:
        """Of training on so many tokens, padding included; None where it does not run."""
        return tokens / self.tokens_per_s / 3600 if self.tokens_per_s and self.fits else None

    def cost(self, tokens: int) -> float | None:
        """Of those hours; None without a price."""
        each = self.cost_per_million_tokens
        return None if each is None else each * tokens / 1e6

    @property
    def how(self) -> str:
        """All that is not as in the recipe, as a shell takes it."""
        rows = [] if self.micro_batch_size is None else [f"micro_batch_size={self.micro_batch_size}"]
        return " ".join([self.overrides, *rows] if self.overrides else rows)

    def document(self, tokens: int = 0) -> dict[str, Any]:
        """The offer as JSON-able fields; with `tokens`, what training on so many takes."""
        of_all = {"hours": self.hours(tokens), "cost": self.cost(tokens)} if tokens else {}
        return asdict(self) | {"cost_per_million_tokens": self.cost_per_million_tokens} | of_all


def read_tokens(text: str, origin: str) -> int:
    """`35M` as 35,000,000. Raises InputError, which begins with `origin`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMB]?)", text.replace(",", ""))
    tokens = int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[match[2]]) if match else 0
    if not tokens:
        raise InputError(
            f"{origin} {shortened(text)}: write a number, as in 35M, which 50,000 examples of 700 tokens are "
            "(k, M and B are thousands, millions and billions)."
        )
    return tokens


def _offer(device: Hardware, needed: int, tokens_per_s: float | None, bound: str | None, fits: bool) -> Offer:
    sheet = device.datasheet
    reason = "" if fits else f"needs {needed / GIB:.1f} GiB"
    common = sheet.name, sheet.title, device.memory_bytes, needed, fits, reason
    return Offer(*common, tokens_per_s, bound, device.price_per_hour)


def unable(device: Hardware, recipe: Recipe) -> Offer:
    """Of a device that cannot compute the recipe's dtype or attention."""
    sheet, reason = device.datasheet, device.lacks(recipe)
    common = sheet.name, sheet.title, device.memory_bytes, None, False, reason
    return Offer(*common, price_per_hour=device.price_per_hour)


def too_small(device: Hardware, kept_bytes: int) -> Offer:
    """Of a device with less memory than what stays from step to step: how much more it needs nobody asked."""
    offer = _offer(device, kept_bytes, None, None, fits=False)
    return replace(offer, reason=f"{kept_bytes / GIB:.1f} GiB stay on the device from step to step")


def needs_as_another(device: Hardware, needed: int) -> Offer:
    """Of a device far too small for what the step was seen to need on one that runs other kernels."""
    offer = _offer(device, needed, None, None, fits=False)
    return replace(offer, reason=f"needs about {needed / GIB:.1f} GiB")


def estimated(recipe: Recipe, device: Hardware) -> Offer:
    """By arithmetic. Raises InputError for a model that it does not know."""
    memory = estimate(recipe, device, load_shape(recipe.model))
    timing, needed = Timing(memory.sizes), required_bytes(memory)
    return _offer(device, needed, timing.tokens_per_s, timing.bound, needed <= device.memory_bytes)


def simulated(recipe: Recipe, device: Hardware, simulations: Simulations) -> Offer:
    """Of a step that fits, what the process takes; of one that does not, what it would with plenty."""
    profile = simulations.on(device, recipe)
    fits = profile.oom is None
    if not fits:
        profile = simulations.on(with_memory(device, PLENTY_BYTES), recipe)
    step = profile.step
    needed = profile.memory.process_bytes or 0
    offer = _offer(device, needed, step.tokens_per_s, step.bound, fits)
    tight = fits and is_tight(profile, device.memory_bytes - needed)
    return replace(
        offer,
        tight=tight,
        tokens_per_s_range=step.tokens_per_s_range(),
        step_s=step.time_s.median,
        step_parts_s=profile.parts_of_time_s(),
    )


def by_verdict(names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Lines of what is said of devices together, each verdict with their names."""
    for verdict, devices in names.items():
        text = f"{verdict}: {', '.join(devices)}"
        yield from wrap(text, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
