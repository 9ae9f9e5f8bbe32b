"""How many cards of each kind a recipe needs: the smallest number that fits, and the cheapest. No torch.

A recipe of one GPU is divided by FSDP2, so that each card needs less memory; a recipe that says how it is
divided keeps that. Every rank has the recipe's micro batch, so that N cards do N times the work of a step.
"""

from collections.abc import Callable, Iterator, Sequence

from harness.errors import InputError
from harness.fit.device_choice import compare_hardware, number
from harness.fit.offers import GIB, Offer, by_verdict
from harness.recipe import Recipe, check_recipe, on_ranks

ROW = "  {:<22} {:>9} {:>10} {:>10} {:>9} {:>13}"
"""The heading and each row of the table."""
MOST_CARDS = 65_536
"""A larger number of cards is refused."""


def read_counts(text: str) -> list[int]:
    """The numbers of cards in text like `1,2,4,8`, sorted, each once. Raises InputError for anything else."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or not 1 <= counts[0] <= counts[-1] <= MOST_CARDS:
        raise InputError(f"--gpus {text}: write numbers of cards, from 1 to {MOST_CARDS:,}, as in 1,2,4,8.")
    return counts


def among(recipe: Recipe, gpus: int) -> Recipe:
    """The recipe on `gpus` cards: divided as it says itself, or else by FSDP2. Raises InputError where it
    cannot be divided so."""
    asked_by = f"--gpus {gpus}"
    if not recipe.distributed and gpus > 1:
        fields = recipe.model_dump() | {"parallel": "fsdp", "dp_shard": gpus}
        return check_recipe(fields, f"{asked_by} divides by FSDP2 unless the recipe says parallel=ddp")
    return on_ranks(recipe, gpus, asked_by)


def compare_counts(
    recipe: Recipe,
    counts: Sequence[int],
    prices: dict[str, float],
    told: Callable[[str], None] = lambda line: None,
) -> list[Offer]:
    """Every number in `counts` of cards of every device, by arithmetic, since simulating each takes minutes.

    `prices` are per hour and card, by device name. `told` is called with lines about the progress. Raises
    InputError as `compare_hardware` and `among` do.
    """
    return [
        offer
        for gpus in counts
        for offer in compare_hardware(among(recipe, gpus), prices, told, by_arithmetic=True)
    ]


def render_counts(name: str, found: Sequence[Offer], tokens: int = 0) -> str:
    """A table with the smallest number of cards that fits for each device, and then the smallest and the
    cheapest of all. With `tokens` it has the hours and the cost of training on so many."""
    return "\n".join(_lines(name, found, tokens)) + "\n"


def _lines(name: str, found: Sequence[Offer], tokens: int) -> Iterator[str]:
    """The lines of `render_counts`."""
    counts = sorted({cards.gpus for cards in found})
    yield f"{name} on {', '.join(map(str, counts))} cards: the fewest of each device that fit, by arithmetic"
    if tokens:
        yield f"{tokens:,} tokens, on all cards together"
    yield ""
    money = ("hours", "cost") if tokens else ("per hour", "per 1M tokens")
    yield ROW.format("cards", "each GiB", "needs GiB", "tokens/s", *money)
    fewest = [cards for cards in map(_fewest, _by_device(found)) if cards]
    for cards in sorted(fewest, key=lambda cards: (cards.gpus, cards.memory_bytes)):
        spent = (cards.all_price_per_hour, 2), (cards.cost_per_million_tokens, 3)
        if tokens:
            spent = (cards.hours(tokens), 1), (cards.cost(tokens), 2)
        sizes = (f"{size / GIB:.1f}" for size in (cards.memory_bytes, cards.required_bytes or 0))
        amounts = (number(amount, 1, digits) for amount, digits in ((cards.tokens_per_s, 0), *spent))
        yield ROW.format(f"{cards.gpus} × {cards.name}", *sizes, *amounts)
    none: dict[str, list[str]] = {}
    for offer in (cards[0] for cards in _by_device(found) if not _fewest(cards)):
        unable = offer.required_bytes is None
        verdict = f"cannot run it, {offer.reason}" if unable else "none of these numbers fits"
        none.setdefault(verdict, []).append(offer.name)
    yield from by_verdict(none)
    yield ""
    if not fewest:
        yield f"  not even {counts[-1]} cards of any device: try more, or what `harness fit` proposes"
        return
    smallest = min(fewest, key=lambda cards: (cards.gpus, cards.memory_bytes))
    yield f"  the smallest: {smallest.gpus} × {smallest.name}"
    priced = [cards for cards in found if cards.cost_per_million_tokens is not None]
    if len({cards.name for cards in priced}) > 1:
        cheapest = min(priced, key=lambda cards: cards.cost_per_million_tokens or 0)
        cost = f"{cheapest.cost_per_million_tokens:.3f} per million tokens"
        yield f"  the cheapest of those with a price: {cheapest.gpus} × {cheapest.name}, {cost}"
        hourly = min(priced, key=lambda cards: cards.all_price_per_hour or 0)
        yield f"  the cheapest by the hour: {hourly.gpus} × {hourly.name}, {hourly.all_price_per_hour:.2f}"
    else:
        yield "  give prices of several (--price h200=3.5, or --prices FILE) to see which is the cheapest"


def _by_device(found: Sequence[Offer]) -> list[list[Offer]]:
    """The cards in one list for each device."""
    devices: dict[str, list[Offer]] = {}
    for cards in found:
        devices.setdefault(cards.name, []).append(cards)
    return list(devices.values())


def _fewest(cards: Sequence[Offer]) -> Offer | None:
    """The smallest number among `cards`, which are of one device, that fits; None if none does."""
    return min((each for each in cards if each.fits), key=lambda each: each.gpus, default=None)
