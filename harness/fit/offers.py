"""What one device of the table offers for a recipe: whether it fits, speed and cost. No torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from textwrap import wrap
from typing import Any

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.simulations import Simulations
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.napkin import estimate, step_time
from harness.recipe import Recipe, shortened
from harness.step_profile import is_tight
from harness.units import GIB

UNSURE = 0.25
"""The fraction by which arithmetic is taken to be wrong at most, to decide what is worth a simulation."""


@dataclass(frozen=True)
class Offer:
    """What one device does with the recipe. Times and costs are None where it cannot run it."""

    name: str
    """The device's name in the table."""
    title: str
    """The device's name for readers."""
    memory_bytes: int
    """The device's memory."""
    required_bytes: int | None
    """What the recipe needs of it, with the CUDA context; None where it cannot run the recipe at all."""
    fits: bool
    reason: str
    """Why it cannot run the recipe; empty when it can."""
    tokens_per_s: float | None = None
    """Of all cards together."""
    bound: str | None = None
    """What limits the speed: compute, memory or host."""
    price_per_hour: float | None = None
    """The price of one card."""
    tokens_per_s_range: tuple[float, float] | None = None
    """The range that the speed is in with a probability of 80 %, by how far estimates of such kernels were
    off from measurements; None by arithmetic."""
    tight: bool = False
    """Whether it fits with so little to spare that memory nobody counts decides
    (step_profile/in_words.py)."""
    overrides: str = ""
    """A change that costs next to nothing and makes the recipe fit, or run faster. The offer is for the
    recipe with it; empty where nothing is changed."""
    slowdown: float | None = None
    """The time for a token with `overrides` over that without, where they make it fit; None if unknown."""
    micro_batch_size: int | None = None
    """The fastest micro batch size on the device, where it was looked for; None for the recipe's own."""
    step_s: float | None = None
    """The seconds of a step; None by arithmetic."""
    step_parts_s: dict[str, float] = field(default_factory=dict[str, float])
    """The parts of a step's seconds (StepProfile.parts_of_time_s); empty by arithmetic."""
    gpus: int = 1
    """How many such cards the recipe is divided among. Each needs `required_bytes`."""

    @property
    def all_price_per_hour(self) -> float | None:
        """The price of an hour of all cards together; None where no price was given."""
        return None if self.price_per_hour is None else self.price_per_hour * self.gpus

    @property
    def cost_per_million_tokens(self) -> float | None:
        """The price of training on a million tokens; None without a price or a speed."""
        if self.all_price_per_hour is None or not self.tokens_per_s or not self.fits:
            return None
        return self.all_price_per_hour / (self.tokens_per_s * 3600) * 1e6

    def hours(self, tokens: int) -> float | None:
        """The hours of training on so many tokens, padding included; None where the cards cannot."""
        return tokens / self.tokens_per_s / 3600 if self.tokens_per_s and self.fits else None

    def cost(self, tokens: int) -> float | None:
        """The price of training on so many tokens; None without a price."""
        per_million = self.cost_per_million_tokens
        return None if per_million is None else per_million * tokens / 1e6

    @property
    def how(self) -> str:
        """Everything that differs from the recipe, as `field=value` words for a shell."""
        rows = [] if self.micro_batch_size is None else [f"micro_batch_size={self.micro_batch_size}"]
        return " ".join([self.overrides, *rows] if self.overrides else rows)

    def document(self, tokens: int = 0) -> dict[str, Any]:
        """The offer as fields for JSON; with `tokens` also the hours and the cost of training on so many."""
        of_all = {"hours": self.hours(tokens), "cost": self.cost(tokens)} if tokens else {}
        together = {
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "all_tokens_per_s": self.tokens_per_s if self.fits else None,
            "all_price_per_hour": self.all_price_per_hour,
        }
        return asdict(self) | together | of_all


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
    """The offer of a device on which the recipe needs `needed` bytes."""
    offer = without_the_step(device, "" if fits else f"needs {needed / GIB:.1f} GiB", needed)
    return replace(offer, fits=fits, tokens_per_s=tokens_per_s, bound=bound)


def without_the_step(device: Hardware, reason: str, required_bytes: int | None = None) -> Offer:
    """The offer of a device that does not run the recipe, for a reason that is known without trying."""
    sheet, price = device.datasheet, device.price_per_hour
    common = sheet.name, sheet.title, device.memory_bytes, required_bytes, False, reason
    return Offer(*common, price_per_hour=price)


def estimated(recipe: Recipe, device: Hardware) -> Offer:
    """The offer by arithmetic. Raises InputError for a model that napkin cannot estimate."""
    memory = estimate(recipe, device, load_shape(recipe.model))
    time, needed = step_time(memory), memory.required_bytes
    return _offer(device, needed, time.tokens_per_s, time.bound, needed <= device.memory_bytes)


def simulated(recipe: Recipe, device: Hardware, simulations: Simulations) -> Offer:
    """The offer by simulation. If the step does not fit, it has what the step needs with plenty of memory."""
    fits = simulations.fits(device, recipe)
    profile = simulations.on(device if fits else with_memory(device, PLENTY_BYTES), recipe)
    step = profile.step
    needed = profile.memory.process_bytes or 0
    offer = _offer(device, needed, step.tokens_per_s, step.bound, fits)
    tight = is_tight(profile)
    return replace(
        offer,
        tight=tight,
        tokens_per_s_range=step.tokens_per_s_range(),
        step_s=step.time_s.median,
        step_parts_s=profile.parts_of_time_s(),
    )


def by_verdict(names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Wrapped lines, one paragraph for each verdict with the names of its devices. `names` is by verdict."""
    for verdict, devices in names.items():
        text = f"{verdict}: {', '.join(devices)}"
        yield from wrap(text, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
