"""Every device of the table for one recipe: does it fit, how fast is it, what does a token cost.

By arithmetic, without torch; a model that arithmetic does not know is simulated on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from textwrap import wrap
from typing import Any, NamedTuple

from harness.architecture import ModelShape, load_shape
from harness.errors import InputError
from harness.hardware import PLENTY_BYTES, Hardware, all_hardware, with_memory
from harness.napkin import Timing, estimate, required_bytes
from harness.recipe import Recipe

GIB = 2**30


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

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Price of an hour over the tokens of an hour, times a million; None without either."""
        if self.price_per_hour is None or not self.tokens_per_s or not self.fits:
            return None
        return self.price_per_hour / (self.tokens_per_s * 3600) * 1e6

    def document(self) -> dict[str, Any]:
        """The offer as JSON-able fields."""
        return asdict(self) | {"cost_per_million_tokens": self.cost_per_million_tokens}


def compare_hardware(
    recipe: Recipe, prices: dict[str, float], told: Callable[[str], None] = lambda line: None
) -> list[Offer]:
    """An offer from every device: the cheapest first where there are prices, then the fastest; those that
    cannot run the recipe last. `told` hears of each simulation, where arithmetic does not know the model.
    Raises InputError for a model that neither can answer for."""
    try:
        shape = load_shape(recipe.model)
    except InputError as error:
        told(f"by simulation: {error}")
        needs = partial(_simulated, told=told, warned=set())
    else:
        needs = partial(_estimated, shape=shape)
    offers = [_offer(recipe, hardware, needs) for hardware in all_hardware(prices)]

    def order(offer: Offer) -> tuple[bool, float, float]:
        cost = offer.cost_per_million_tokens
        return (not offer.fits, float("inf") if cost is None else cost, -(offer.tokens_per_s or 0))

    return sorted(offers, key=order)


class _Needs(NamedTuple):
    """What a recipe needs of a device, and how fast it is there."""

    size_bytes: int
    tokens_per_s: float | None
    bound: str | None


def _offer(recipe: Recipe, hardware: Hardware, needs: Callable[[Recipe, Hardware], _Needs]) -> Offer:
    sheet = hardware.datasheet
    common = (sheet.name, sheet.title, hardware.memory_bytes)
    if not hardware.supports(recipe.compute_dtype):
        reason = f"no {recipe.compute_dtype} units"
        return Offer(*common, None, False, reason, price_per_hour=hardware.price_per_hour)
    try:
        needed, tokens_per_s, bound = needs(recipe, hardware)
    except InputError as error:
        raise InputError(f"{sheet.name}: {error}") from None
    fits = needed <= hardware.memory_bytes
    reason = "" if fits else f"needs {needed / GIB:.1f} GiB"
    return Offer(*common, needed, fits, reason, tokens_per_s, bound, hardware.price_per_hour)


def _estimated(recipe: Recipe, hardware: Hardware, shape: ModelShape) -> _Needs:
    memory = estimate(recipe, hardware, shape)
    timing = Timing(memory.sizes)
    return _Needs(required_bytes(memory), timing.tokens_per_s, timing.bound)


def _simulated(recipe: Recipe, hardware: Hardware, told: Callable[[str], None], warned: set[str]) -> _Needs:
    """Of a step that fits, what the process takes; of one that does not, what it would with plenty. `told`
    hears each warning once: those in `warned` it has heard.
    """
    from harness.simulate import simulate

    told(f"simulating on {hardware.name}")
    profile = simulate(recipe, hardware, explain_oom=False)[0]
    for warning in set(profile.warnings) - warned:
        told(f"warning: {warning}")
    warned |= set(profile.warnings)
    if profile.oom is not None:
        profile = simulate(recipe, with_memory(hardware, PLENTY_BYTES), explain_oom=False)[0]
    return _Needs(profile.memory.process_bytes or 0, profile.step.tokens_per_s, profile.step.bound)


def render_table() -> str:
    """Every device of the table with its datasheet numbers."""
    lines = [
        f"  {'device':<17} {'memory GiB':>10} {'GB/s':>7} {'TFLOP/s bf16':>13} {'fp16':>8} {'fp32':>8}",
        *(_sheet_line(hardware) for hardware in all_hardware()),
        "",
        "  hardware=NAME chooses one; `harness hardware RECIPE` tries a recipe on all of them",
    ]
    return "\n".join(lines) + "\n"


def _sheet_line(hardware: Hardware) -> str:
    sheet = hardware.datasheet
    bf16, fp16, fp32 = (
        _number(cited and cited.value, 1e-12, 1) for cited in map(sheet.flops.get, ("bf16", "fp16", "fp32"))
    )
    memory, bandwidth = hardware.memory_bytes / GIB, sheet.memory_bandwidth.value / 1e9
    return f"  {sheet.name:<17} {memory:10.1f} {bandwidth:7,.0f} {bf16:>13} {fp16:>8} {fp32:>8}"


def render_choice(name: str, offers: list[Offer]) -> str:
    """The offers as a table, then the cheapest and the fastest."""
    return "\n".join(_lines(name, offers)) + "\n"


def _lines(name: str, offers: list[Offer]) -> Iterator[str]:
    yield f"{name} on every device of the table"
    yield ""
    yield "  device            has GiB needs GiB  tokens/s   bound per hour per 1M tokens"
    running = [offer for offer in offers if offer.fits]
    for offer in running:
        cells = [
            f"{offer.memory_bytes / GIB:7.1f}",
            f"{_number(offer.required_bytes, 1 / GIB, 1):>9}",
            f"{_number(offer.tokens_per_s, 1, 0):>9}",
            f"{offer.bound or '-':>7}",
            f"{_number(offer.price_per_hour, 1, 2):>8}",
            f"{_number(offer.cost_per_million_tokens, 1, 3):>13}",
        ]
        yield f"  {offer.name:<17} {' '.join(cells)}"
    if len(running) < len(offers):
        yield ""
    others: dict[str, list[str]] = {}  # by verdict; what cannot run it has no speed, and comes last
    for offer in offers:
        if offer.required_bytes is None:
            others.setdefault(f"cannot run it, {offer.reason}", []).append(offer.name)
        elif not offer.fits:
            size = f"{offer.memory_bytes / GIB:.1f} GiB"
            others.setdefault(f"does not fit, {offer.reason}", []).append(f"{offer.name} ({size})")
    for verdict, names in others.items():
        text = f"{verdict}: {', '.join(names)}"
        yield from wrap(text, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    yield ""
    if not running:
        yield "  none of them fits (see `harness fit`)"
        return
    priced = [offer for offer in running if offer.cost_per_million_tokens is not None]
    if len(priced) > 1:
        cheapest = min(priced, key=lambda o: o.cost_per_million_tokens or 0)
        cost = f"{cheapest.cost_per_million_tokens:.3f} per million tokens"
        yield f"  the cheapest of the {len(priced)} with a price: {cheapest.name}, {cost}"
    else:
        yield "  give prices of several (--price h200=3.5, or --prices FILE) to see which is the cheapest"
    fastest = max(running, key=lambda o: o.tokens_per_s or 0)
    yield f"  the fastest: {fastest.name}, {fastest.tokens_per_s:,.0f} tokens/s"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"
