"""What to change in a recipe so that it needs less: single changes, and the fewest that are enough together.

No torch. The caller says how a recipe is priced: by napkin's arithmetic, or by simulations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from harness.architecture import ModelShape, liger_has, why_no_sdpa
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin import estimate, step_time
from harness.recipe import Recipe

WORTHWHILE = 0.005
"""A change that saves a smaller fraction of the required memory than this is not suggested."""
FREE = 1.05
"""A change that keeps the result and makes a token at most so many times as long is combined with others even
where it saves nothing by itself, since what the others leave may be what it saves."""
SHORTEST_HALVED = 256
"""Halving the sequence is suggested only from this many tokens on."""

SAME_RESULT: tuple[dict[str, Any], ...] = (
    {"attention": "sdpa"},
    {"loss": "fused_linear"},
    {"optimizer_impl": "fused"},
    {"gradient_checkpointing": True},
    {"mlp_tiles": 4},
    {"optimizer_in_backward": True},
    {"offload": ("checkpoints",)},
    {"offload": ("activations",)},
    {"offload": ("optimizer",)},
    {"offload": ("parameters",)},
    {"cpu_offload": True},
)
"""Changes after which the same weights are trained to the same values, but for rounding."""
OTHER_RESULT: tuple[dict[str, Any], ...] = (
    {"optimizer": "adamw_8bit", "optimizer_impl": "foreach"},
    {"optimizer": "paged_adamw_8bit", "optimizer_impl": "foreach"},
    {"precision": "bf16", "master_weights": False},
    {"upcast_for_kbit": False},
    {"adapter": "lora", "master_weights": False},
    {"adapter": "lora", "quantization": "nf4", "double_quant": True, "master_weights": False},
)
"""Changes of what is trained, or of how exactly."""


@dataclass(frozen=True)
class Change:
    """One change of a recipe, and what memory and time it costs or saves."""

    fields: dict[str, Any]
    """The recipe fields that it sets, with their values."""
    overrides: str
    """The fields that differ from the recipe, as `field=value` words for a shell."""
    required_bytes: int
    """The memory that the changed recipe needs."""
    saved_bytes: int
    """How much less that is at the peak. It and `slowdown` are from simulations where `seen` and `fits` are
    true, and otherwise by arithmetic."""
    slowdown: float
    """The time for a token after the change over that before it. Below 1 the change makes it faster."""
    fits: bool
    """Whether the changed recipe fits: in a simulation where `seen` is true, otherwise by arithmetic."""
    same_result: bool
    """Whether the same weights are still trained to the same values, but for rounding."""
    seen: bool = False
    """Whether the changed recipe was simulated."""


class Price(NamedTuple):
    """The cost of a recipe on a device: the bytes that it needs, and its speed in tokens per second."""

    required_bytes: int
    tokens_per_s: float


Pricing = Callable[[Recipe], Price]
"""A function that prices a recipe. It raises InputError for one that the device cannot run."""


def by_arithmetic(hardware: Hardware, shape: ModelShape) -> Pricing:
    """A function that prices recipes on `hardware`, for a model of `shape`, by napkin's arithmetic."""

    def price(recipe: Recipe) -> Price:
        memory = estimate(recipe, hardware, shape)
        return Price(memory.required_bytes, step_time(memory).tokens_per_s)

    return price


def suggestions(recipe: Recipe, limit_bytes: int, price: Pricing) -> list[Change]:
    """Single changes that lower the memory that `recipe` needs by at least WORTHWHILE of it.

    Those that keep the training's result come first, and each group is sorted by time. Change.fits says
    whether the changed recipe needs at most `limit_bytes`.
    """
    worthwhile = WORTHWHILE * price(recipe).required_bytes
    return [change for change in _priced(recipe, limit_bytes, price) if change.saved_bytes >= worthwhile]


def _priced(recipe: Recipe, limit_bytes: int, price: Pricing) -> list[Change]:
    """Every single change that is possible, in the order of `suggestions`."""
    now = price(recipe)
    found: list[Change] = []
    for same_result, change in _candidates(recipe):
        fields = change
        if "offload" in change:  # added to what the recipe offloads already
            fields = {"offload": tuple(dict.fromkeys((*recipe.offload, *change["offload"])))}
        after = _price_with(recipe, fields, price)
        if after is None:
            continue
        found.append(
            Change(
                fields=fields,
                overrides=overrides(recipe, fields),
                required_bytes=after.required_bytes,
                saved_bytes=now.required_bytes - after.required_bytes,
                slowdown=now.tokens_per_s / after.tokens_per_s,
                fits=after.required_bytes <= limit_bytes,
                same_result=same_result,
            )
        )
    return sorted(found, key=_cheapness)


def _cheapness(change: Change) -> tuple[bool, float]:
    """The order of changes: those that keep the result first, each group by time."""
    return not change.same_result, change.slowdown


def combined(
    recipe: Recipe, limit_bytes: int, changes: list[Change], price: Pricing
) -> dict[str, Any] | None:
    """The fields of the fewest `changes` with which the recipe fits `limit_bytes`; None if there are none.

    Changes are added one after the other, the cheapest first, each kept if it lowers the need. Those that
    turn out not to be needed are left out again, the dearest first. A cheap change may exclude one that saves
    more, so where that is not enough each change is tried as the first. What is FREE may be among them
    though it saves nothing by itself.
    """
    free = [c for c in _priced(recipe, limit_bytes, price) if c.same_result and c.slowdown <= FREE]
    listed = [change.fields for change in changes]
    others = [change for change in free if change.overrides and change.fields not in listed]
    everything = sorted([*changes, *others], key=_cheapness)
    for first in ([], *([change] for change in changes)):
        enough = _enough(recipe, limit_bytes, first, everything, price)
        if enough is not None:
            return enough
    return None


def _enough(
    recipe: Recipe, limit_bytes: int, first: list[Change], changes: list[Change], price: Pricing
) -> dict[str, Any] | None:
    """`combined`, beginning with the changes in `first`."""
    kept = first
    start = _price_with(recipe, _together(kept), price)
    if start is None:
        return None
    needed = start.required_bytes
    for change in changes:
        if needed <= limit_bytes:
            break
        after = _price_with(recipe, _together([*kept, change]), price)
        if after is not None and after.required_bytes < needed:
            kept, needed = [*kept, change], after.required_bytes
    if needed > limit_bytes:
        return None
    for change in reversed(kept):
        fewer = [other for other in kept if other is not change]
        after = _price_with(recipe, _together(fewer), price)
        if after is not None and after.required_bytes <= limit_bytes:
            kept = fewer
    return _together(kept)


def _together(changes: list[Change]) -> dict[str, Any]:
    """The fields of all changes. Where two set the same field the later one wins, but offloads add up."""
    fields: dict[str, Any] = {}
    for change in changes:
        offload = (*fields.get("offload", ()), *change.fields.get("offload", ()))
        fields |= change.fields
        if offload:
            fields["offload"] = tuple(dict.fromkeys(offload))
    return fields


def _price_with(recipe: Recipe, fields: dict[str, Any], price: Pricing) -> Price | None:
    """The price with `fields`; None if they break a rule, or this model or device cannot have them."""
    if fields.get("attention") == "sdpa" and why_no_sdpa(recipe.model):
        return None
    if fields.get("loss") == "fused_linear" and not liger_has(recipe.model):
        return None
    try:
        return price(changed(recipe, fields))
    except (ValidationError, InputError):
        return None


def _candidates(recipe: Recipe) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Every change to look at: whether it keeps the training's result, and its fields."""
    for fields in SAME_RESULT:
        yield True, fields
    if recipe.micro_batch_size > 1:
        rows = recipe.micro_batch_size
        steps = recipe.gradient_accumulation_steps * rows
        yield True, {"micro_batch_size": 1, "gradient_accumulation_steps": steps}
    for fields in OTHER_RESULT:
        yield False, fields
    if recipe.seq_len >= SHORTEST_HALVED:
        yield False, {"seq_len": recipe.seq_len // 2}


def changed(recipe: Recipe, fields: dict[str, Any]) -> Recipe:
    """The recipe with `fields`. Raises ValidationError if the change breaks a rule."""
    return Recipe(**{**recipe.model_dump(), **fields})


def overrides(recipe: Recipe, fields: dict[str, Any]) -> str:
    """Those of `fields` that differ from the recipe, as `field=value` words for a shell."""
    differing = {name: value for name, value in fields.items() if value != getattr(recipe, name)}
    return " ".join(f"{name}={_spelled(value)}" for name, value in differing.items())


def _spelled(value: Any) -> str:
    """A field's value as the command line takes it."""
    if isinstance(value, tuple):  # brackets mean something to a shell
        names = cast("tuple[str, ...]", value)
        return names[0] if len(names) == 1 else f"'[{','.join(names)}]'"
    return str(value).lower() if isinstance(value, bool) else str(value)
