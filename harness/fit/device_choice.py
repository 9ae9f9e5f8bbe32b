"""Every device of the table for one recipe: does it fit, how fast is it, what does a token cost.

By simulation, once for devices that run the same kernels; without torch where it was asked before.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from textwrap import wrap

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.best import best_offers
from harness.fit.changes import overrides
from harness.fit.held_back import NEUTRAL, cost_in_words, neutrally_changed
from harness.fit.offers import GIB, UNSURE, Offer, by_verdict, estimated, simulated, without_the_step
from harness.fit.simulations import Simulations, all_at_once, simulations_on
from harness.hardware import Hardware, all_hardware
from harness.napkin import estimate
from harness.recipe import Recipe
from harness.step_profile import time_in_words
from harness.system import collected_by_hand
from harness.units import in_ms

AT_FIRST = 2
"""Kinds of devices that are simulated at once, before it is known for which others that is in vain."""
KINDS_APART = 0.1
"""A kind needs at most this much less than another: of this project's recipes 3 %, of a step of 0.6 GiB 7 %
(cuBLAS's workspace). One without flash attention needs up to half as much again."""
WORKSPACES_BYTES = 2**28
"""More than the libraries' workspaces, which stay on the device too and are not the same on every kind."""


@collected_by_hand()
def compare_hardware(
    recipe: Recipe,
    prices: dict[str, float],
    told: Callable[[str], None] = lambda line: None,
    *,
    by_arithmetic: bool = False,
    best: bool = False,
) -> list[Offer]:
    """An offer from every device: the cheapest first where there are prices, then the fastest; those that
    cannot run the recipe last. With `best` each with the micro batch and toggles with which it is fastest,
    and where they are unknown with the recipe's own.

    One simulation for each compute capability, unless it is kept from an earlier question or all of its
    devices are far too small by what another needs: devices of one run the same kernels at their own rates.
    `told` hears of each, and its warnings. What cannot be simulated is answered by arithmetic, and so is all
    where that is asked for. Raises InputError for what nobody knows.
    """
    devices = all_hardware(prices)
    able = [device for device in devices if not device.lacks(recipe)]
    told = cache(told)  # each line once
    offers = [without_the_step(device, device.lacks(recipe)) for device in devices if device not in able]
    offers += best_offers(recipe, _by_kernels(able), told) if best else []
    answered = {offer.name for offer in offers}
    kinds = changeable = _by_kernels([device for device in able if device.name not in answered])
    if not by_arithmetic:
        all_at_once((simulations_on(alike, told), recipe) for alike in kinds[:AT_FIRST])
        seen = [simulations_on(alike, told) for alike in kinds]
        small = {offer.name: offer for offer in _without_what_stays(recipe, seen)}
        kinds = changeable = [alike for alike in kinds if alike[0].name not in small]
        rest = [simulations for simulations in seen if simulations.hardware.name not in small]
        small |= {offer.name: offer for offer in _far_too_small(recipe, rest)}
        kinds = [alike for alike in kinds if alike[0].name not in small]
        offers += small.values()
        all_at_once((simulations_on(alike, told), recipe) for alike in kinds[AT_FIRST:])
    for alike in kinds:
        offers += _offers(recipe, alike, told, by_arithmetic)
    if not best and not by_arithmetic:
        offers = _with_neutral_change(recipe, offers, changeable, told)

    offers = [replace(offer, gpus=recipe.world_size) for offer in offers]

    def order(offer: Offer) -> tuple[bool, float, bool, float]:
        cost, runs = offer.cost_per_million_tokens, offer.required_bytes is not None
        return (not offer.fits, float("inf") if cost is None else cost, not runs, -(offer.tokens_per_s or 0))

    return sorted(offers, key=order)


def _without_what_stays(recipe: Recipe, kinds: list[Simulations]) -> Iterator[Offer]:
    """Of all devices of a kind that nobody has simulated yet, where weights, gradients and optimizer states,
    which are the same on every kind, do not fit the largest."""
    with suppress(InputError):
        bare = kinds[0].kept_bytes(recipe) - _context_bytes(kinds[0]) if kinds else 0
        for kind in kinds:
            kept = bare + _context_bytes(kind)
            reason = f"{kept / GIB:.1f} GiB stay on the device from step to step"
            if kept - WORKSPACES_BYTES > _largest(kind.devices) and not kind.knows(recipe):
                yield from (without_the_step(device, reason, kept) for device in kind.devices)


def _far_too_small(recipe: Recipe, kinds: list[Simulations]) -> Iterator[Offer]:
    """The same where the largest is far too small for what the step needs on another kind."""
    known = [kind for kind in kinds if kind.knows(recipe)]
    profiles = [kind.with_plenty(recipe) for kind in known]
    reserved = min((profile.memory.peak_reserved_bytes or 0 for profile in profiles), default=0)
    for kind in kinds if reserved else ():
        needed = reserved + _context_bytes(kind)
        reason = f"needs about {needed / GIB:.1f} GiB"
        if kind not in known and needed * (1 - KINDS_APART) > _largest(kind.devices):
            yield from (without_the_step(device, reason, needed) for device in kind.devices)


def _context_bytes(kind: Simulations) -> int:
    return kind.hardware.calibration.cuda_context_bytes


def _largest(alike: list[Hardware]) -> int:
    return max(device.memory_bytes for device in alike)


def _with_neutral_change(
    recipe: Recipe, offers: list[Offer], kinds: list[list[Hardware]], told: Callable[[str], None]
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
        now, then = (estimate(each, device, shape).required_bytes for each in (recipe, other))
        saved = now - then
        return (offer.required_bytes or 0) - saved * (1 + UNSURE) <= device.memory_bytes

    hopeful = [alike for alike in kinds if any(may_fit(device) for device in alike)]
    all_at_once((simulations_on(alike, told), other) for alike in hopeful)
    found = [offer for alike in hopeful for offer in _offers(other, alike, told, by_arithmetic=False)]
    spelled = overrides(recipe, NEUTRAL)
    better: dict[str, Offer] = {}
    for offer in found:
        if offer.fits and offer.name in short:
            now, then = short[offer.name].tokens_per_s, offer.tokens_per_s
            slowdown = now / then if now and then else None
            better[offer.name] = replace(offer, overrides=spelled, slowdown=slowdown)
    return [better.get(offer.name, offer) for offer in offers]


def _by_kernels(devices: list[Hardware]) -> list[list[Hardware]]:
    """Devices that run the same kernels, the kind with the largest first. What follows from their
    multiprocessors too is small: what some reductions leave to be summed."""
    alike: dict[str, list[Hardware]] = {}
    for device in devices:
        alike.setdefault(device.datasheet.compute_capability, []).append(device)
    return sorted(alike.values(), key=lambda kind: -_largest(kind))


def _offers(
    recipe: Recipe, alike: list[Hardware], told: Callable[[str], None], by_arithmetic: bool
) -> list[Offer]:
    """Of devices that run the same kernels."""
    if by_arithmetic:
        with suppress(InputError):
            return [estimated(recipe, device) for device in alike]
    simulations = simulations_on(alike, told)
    try:
        for warning in simulations.timed(recipe).warnings:
            told(f"warning: {warning}")
    except InputError as error:
        told(f"by arithmetic: {error}")
        return [estimated(recipe, device) for device in alike]
    offers = [simulated(recipe, device, simulations) for device in alike]
    simulations.keep()
    return offers


def render_table() -> str:
    """Every device of the table with its datasheet numbers."""
    row, dtypes = "  {:<17} {:>10} {:>7} {:>13} {:>8} {:>8}", ("bf16", "fp16", "fp32")
    lines = [row.format("device", "memory GiB", "GB/s", "TFLOP/s bf16", *dtypes[1:])]
    for device in all_hardware():
        sheet = device.datasheet
        flops = (number(cited and cited.value, 1e-12, 1) for cited in map(sheet.flops.get, dtypes))
        bandwidth = number(sheet.memory_bandwidth.value, 1e-9, 0)
        lines.append(row.format(sheet.name, number(device.memory_bytes, 1 / GIB, 1), bandwidth, *flops))
    lines += ["", "  hardware=NAME chooses one; `harness hardware RECIPE` tries a recipe on all of them"]
    return "\n".join(lines) + "\n"


def render_choice(name: str, offers: list[Offer], unit: str = "row", tokens: int = 0) -> str:
    """The offers as a table, then the cheapest and the fastest. `unit`: what a micro batch counts. With
    `tokens`, the hours and the cost of training on so many."""
    return "\n".join(_lines(name, offers, f"{unit}s", tokens)) + "\n"


def _lines(name: str, offers: list[Offer], units: str, tokens: int) -> Iterator[str]:
    gpus = offers[0].gpus
    kinds = "every device" if gpus == 1 else f"{gpus} of every device"
    yield f"{name} on {kinds} of the table" + (f": {tokens:,} tokens" if tokens else "")
    if gpus > 1:
        yield f"GiB are of one GPU, speed and money of all {gpus} together"
    yield ""
    running = [offer for offer in offers if offer.fits]
    best = any(offer.micro_batch_size for offer in offers)
    column = units if best else "bound"
    money = f"{'hours':>7} {'cost':>6}" if tokens else "an hour per 1M"
    yield f"  device            GiB of needs tokens/s (80 % range)    {column:>7} {money}"
    changes = list(dict.fromkeys(offer.overrides for offer in running if offer.overrides))
    row = "  {:<19}{:>5} {:>5} {:>7} {:<15} {:>7} {:>7} {:>6}"
    marks = dict(zip(changes, "abcdefghijkl" if best else "*", strict=False)) | {"": ""}
    for offer in running:
        mark = marks[offer.overrides]
        rows = f"{offer.micro_batch_size or '-'} {mark or ' '}" if best else offer.bound or "-"
        sizes = (number(size, 1 / GIB, 1) for size in (offer.memory_bytes, offer.required_bytes))
        speed = _short(offer.tokens_per_s, 1_000_000), _range(offer)
        spent = (offer.all_price_per_hour, 2), (offer.cost_per_million_tokens, 3)
        if tokens:
            spent = (offer.hours(tokens), 1), (offer.cost(tokens), 2)
        name = offer.name + ("" if best else mark) + ("?" if offer.tight else "")
        amounts = (number(amount, 1, digits) for amount, digits in spent)
        yield row.format(name, *sizes, *speed, rows, *amounts)
    if best:
        yield f"  {units}: of a micro batch; each was seen to fit by a simulation of these very sizes"
    for spelled in changes:
        slowest = max((o.slowdown for o in running if o.slowdown and o.overrides == spelled), default=None)
        why = "" if best else f", {cost_in_words(slowest)}; it does not fit without"
        yield f"  {marks[spelled]} with {spelled}{why}"
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
    yield from by_verdict(others)
    yield ""
    if not running:
        yield "  none of them fits (see `harness fit`)"
        return
    sure = [offer for offer in running if not offer.tight] or running
    priced = [offer for offer in sure if offer.cost_per_million_tokens is not None]
    if len(priced) > 1:
        cheapest = min(priced, key=lambda o: o.cost_per_million_tokens or 0)
        cost = f"{cheapest.cost_per_million_tokens:.3f} per million tokens"
        and_how = f", with {cheapest.how}" if cheapest.how else ""
        yield f"  the cheapest of the {len(priced)} with a price: {cheapest.name}, {cost}{and_how}"
        yield from _time_lines(cheapest)
    else:
        yield "  give prices of several (--price h200=3.5, or --prices FILE) to see which is the cheapest"
    fastest = max(sure, key=lambda o: o.tokens_per_s or 0)
    and_how = f", with {fastest.how}" if fastest.how else ""
    yield f"  the fastest: {fastest.name}, {fastest.tokens_per_s:,.0f} tokens/s{and_how}"
    yield from _time_lines(fastest)


def _time_lines(offer: Offer) -> Iterator[str]:
    """What the step's time on the device consists of, where it was simulated."""
    if parts := time_in_words(offer.step_parts_s):
        text = f"of a step's {in_ms(offer.step_s)}: {parts}"
        yield from wrap(text, 78, initial_indent="    ", subsequent_indent="      ")


def _range(offer: Offer) -> str:
    if offer.tokens_per_s_range is None:
        return ""
    low, high = offer.tokens_per_s_range
    return f"({_short(low, 100_000)}-{_short(high, 100_000)})"


def _short(value: float | None, limit: int) -> str:
    """In thousands from `limit` on, so that it has room in its column."""
    return number(value, 1, 0) if (value or 0) < limit else f"{number(value, 1e-3, 0)}k"


def number(value: float | None, factor: float, digits: int) -> str:
    """`value` times `factor` for a column; a dash for None."""
    return "-" if value is None else f"{value * factor:,.{digits}f}"
