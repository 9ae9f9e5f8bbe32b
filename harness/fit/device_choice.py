"""Every device of the table for one recipe: does it fit, how fast is it, what does a token cost.

By simulation, once for devices that run the same kernels; without torch where it was asked before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import Any

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.changes import overrides
from harness.fit.held_back import NEUTRAL, neutrally_changed
from harness.fit.simulations import Simulations, all_at_once
from harness.hardware import PLENTY_BYTES, Hardware, all_hardware, with_memory
from harness.napkin import Timing, estimate, required_bytes
from harness.recipe import Recipe
from harness.step_profile import is_tight

GIB = 2**30
UNSURE = 0.25
"""How far arithmetic may be off in what a change saves, before a simulation is not worth its seconds."""


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
    """It fits with so little to spare that what nobody counts decides (step_profile/not_counted.py)."""
    overrides: str = ""
    """What costs nothing and makes it fit: the offer is of the recipe with these."""

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
    recipe: Recipe,
    prices: dict[str, float],
    told: Callable[[str], None] = lambda line: None,
    *,
    by_arithmetic: bool = False,
) -> list[Offer]:
    """An offer from every device: the cheapest first where there are prices, then the fastest; those that
    cannot run the recipe last.

    One simulation for each compute capability, unless it is kept from an earlier question: devices of one
    run the same kernels at their own rates. `told` hears of each, and its warnings. What cannot be simulated
    is answered by arithmetic, and so is all where that is asked for. Raises InputError for what nobody knows.
    """
    devices = all_hardware(prices)
    able = [device for device in devices if device.supports(recipe.compute_dtype)]
    warned: set[str] = set()
    offers = [_unable(device, recipe) for device in devices if device not in able]
    kinds = _by_kernels(able)
    if not by_arithmetic:
        all_at_once((Simulations(alike[0], told=told, alike=alike[1:]), recipe) for alike in kinds)
    for alike in kinds:
        offers += _offers(recipe, alike, told, warned, by_arithmetic)
    if not by_arithmetic:
        offers = _with_neutral_change(recipe, offers, kinds, told, warned)

    def order(offer: Offer) -> tuple[bool, float, float]:
        cost = offer.cost_per_million_tokens
        return (not offer.fits, float("inf") if cost is None else cost, -(offer.tokens_per_s or 0))

    return sorted(offers, key=order)


def _with_neutral_change(
    recipe: Recipe,
    offers: list[Offer],
    kinds: list[list[Hardware]],
    told: Callable[[str], None],
    warned: set[str],
) -> list[Offer]:
    """The offers, but of devices that a change which costs nothing makes large enough, with that change."""
    other = neutrally_changed(recipe)
    if other is None:
        return offers
    shape = load_shape(recipe.model)
    short = {offer.name: offer for offer in offers if not offer.fits and offer.required_bytes is not None}

    def may_fit(device: Hardware) -> bool:
        offer = short.get(device.datasheet.name)
        if offer is None:
            return False
        saved = required_bytes(estimate(recipe, device, shape)) - required_bytes(
            estimate(other, device, shape)
        )
        return (offer.required_bytes or 0) - saved * (1 + UNSURE) <= device.memory_bytes

    hopeful = [alike for alike in kinds if any(may_fit(device) for device in alike)]
    all_at_once((Simulations(alike[0], told=told, alike=alike[1:]), other) for alike in hopeful)
    found = [offer for alike in hopeful for offer in _offers(other, alike, told, warned, by_arithmetic=False)]
    spelled = overrides(recipe, NEUTRAL)
    better = {o.name: replace(o, overrides=spelled) for o in found if o.fits and o.name in short}
    return [better.get(offer.name, offer) for offer in offers]


def _by_kernels(devices: list[Hardware]) -> list[list[Hardware]]:
    """Devices that run the same kernels. What follows from their multiprocessors too is small: what some
    reductions leave to be summed."""
    alike: dict[str, list[Hardware]] = {}
    for device in devices:
        alike.setdefault(device.datasheet.compute_capability, []).append(device)
    return list(alike.values())


def _offers(
    recipe: Recipe,
    alike: list[Hardware],
    told: Callable[[str], None],
    warned: set[str],
    by_arithmetic: bool,
) -> list[Offer]:
    """Of devices that run the same kernels. `told` hears each warning once: `warned` has those it heard."""
    if by_arithmetic:
        with suppress(InputError):
            return [_estimated(recipe, device) for device in alike]
    simulations = Simulations(alike[0], told=told, alike=alike[1:])
    try:
        for warning in simulations.timed(recipe).warnings:
            if warning not in warned:
                told(f"warning: {warning}")
                warned.add(warning)
    except InputError as error:
        if str(error) not in warned:
            told(f"by arithmetic: {error}")
            warned.add(str(error))
        return [_estimated(recipe, device) for device in alike]
    offers = [_simulated(recipe, device, simulations) for device in alike]
    simulations.keep()
    return offers


def _offer(device: Hardware, needed: int, tokens_per_s: float | None, bound: str | None, fits: bool) -> Offer:
    sheet = device.datasheet
    reason = "" if fits else f"needs {needed / GIB:.1f} GiB"
    common = sheet.name, sheet.title, device.memory_bytes, needed, fits, reason
    return Offer(*common, tokens_per_s, bound, device.price_per_hour)


def _unable(device: Hardware, recipe: Recipe) -> Offer:
    sheet, reason = device.datasheet, f"no {recipe.compute_dtype} units"
    common = sheet.name, sheet.title, device.memory_bytes, None, False, reason
    return Offer(*common, price_per_hour=device.price_per_hour)


def _estimated(recipe: Recipe, device: Hardware) -> Offer:
    memory = estimate(recipe, device, load_shape(recipe.model))
    timing, needed = Timing(memory.sizes), required_bytes(memory)
    return _offer(device, needed, timing.tokens_per_s, timing.bound, needed <= device.memory_bytes)


def _simulated(recipe: Recipe, device: Hardware, simulations: Simulations) -> Offer:
    """Of a step that fits, what the process takes; of one that does not, what it would with plenty."""
    profile = simulations.on(device, recipe)
    fits = profile.oom is None
    if not fits:
        profile = simulations.on(with_memory(device, PLENTY_BYTES), recipe)
    step = profile.step
    needed = profile.memory.process_bytes or 0
    offer = _offer(device, needed, step.tokens_per_s, step.bound, fits)
    tight = fits and is_tight(profile, device.memory_bytes - needed)
    return replace(offer, tight=tight, tokens_per_s_range=step.tokens_per_s_range())


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
    yield "  device            GiB of  needs tokens/s (80 % range)     bound an hour per 1M"
    running = [offer for offer in offers if offer.fits]
    for offer in running:
        cells = [
            f"{offer.memory_bytes / GIB:6.1f}",
            f"{_number(offer.required_bytes, 1 / GIB, 1):>6}",
            f"{_number(offer.tokens_per_s, 1, 0):>7} {_range(offer):<14}",
            f"{offer.bound or '-':>7}",
            f"{_number(offer.price_per_hour, 1, 2):>7}",
            f"{_number(offer.cost_per_million_tokens, 1, 3):>6}",
        ]
        marks = ("*" if offer.overrides else "") + ("?" if offer.tight else "")
        yield f"  {offer.name + marks:<17} {' '.join(cells)}"
    for spelled in dict.fromkeys(offer.overrides for offer in running if offer.overrides):
        yield f"  * with {spelled}, which costs next to nothing; it does not fit without"
    if any(offer.tight for offer in running):
        yield "  ? too tight to call: CUDA's libraries, or a display, may need what is left"
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
    sure = [offer for offer in running if not offer.tight] or running
    priced = [offer for offer in sure if offer.cost_per_million_tokens is not None]
    if len(priced) > 1:
        cheapest = min(priced, key=lambda o: o.cost_per_million_tokens or 0)
        cost = f"{cheapest.cost_per_million_tokens:.3f} per million tokens"
        and_how = f", with {cheapest.overrides}" if cheapest.overrides else ""
        yield f"  the cheapest of the {len(priced)} with a price: {cheapest.name}, {cost}{and_how}"
    else:
        yield "  give prices of several (--price h200=3.5, or --prices FILE) to see which is the cheapest"
    fastest = max(sure, key=lambda o: o.tokens_per_s or 0)
    yield f"  the fastest: {fastest.name}, {fastest.tokens_per_s:,.0f} tokens/s"


def _range(offer: Offer) -> str:
    if offer.tokens_per_s_range is None:
        return ""
    low, high = offer.tokens_per_s_range
    return f"({low:,.0f}-{high:,.0f})"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"
