"""What to change in a recipe so that it needs less: single changes, and the fewest that are enough together.

No torch. What a recipe needs is asked of whoever knows: napkin's arithmetic, or a simulation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from harness.architecture import ModelShape
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin import Timing, estimate, required_bytes
from harness.recipe import Recipe

WORTHWHILE = 0.005
"""A change that saves a smaller fraction than this is not suggested."""
SHORTEST_HALVED = 256
"""A sequence of fewer tokens is not suggested to be halved."""

SAME_RESULT: tuple[dict[str, Any], ...] = (
    {"attention": "sdpa"},
    {"loss": "fused_linear"},
    {"optimizer_impl": "fused"},
    {"gradient_checkpointing": True},
    {"optimizer_in_backward": True},
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
    {"adapter": "lora", "master_weights": False},
    {"adapter": "lora", "quantization": "nf4", "double_quant": True, "master_weights": False},
)
"""Changes of what is trained, or of how exactly."""


@dataclass(frozen=True)
class Change:
    """One thing to change, and what it does to the recipe as it is."""

    fields: dict[str, Any]
    overrides: str
    """Those that differ from the recipe, as a shell takes them."""
    required_bytes: int
    saved_bytes: int
    """At the peak. This and the slowdown are a simulation's where `seen` and `fits`, else arithmetic's."""
    slowdown: float
    """Time a token takes after, over before: below 1 it is faster."""
    fits: bool
    """After it the recipe fits: as it was seen in a simulation, or else by arithmetic."""
    same_result: bool
    seen: bool = False
    """`fits` was seen in a simulation."""


class Price(NamedTuple):
    """What a recipe costs on a device: bytes it must have, and tokens a second."""

    required_bytes: int
    tokens_per_s: float


Pricing = Callable[[Recipe], Price]
"""The price of a recipe. Raises InputError for one that cannot be had on that device."""


def by_arithmetic(hardware: Hardware, shape: ModelShape) -> Pricing:
    """Napkin's prices on `hardware`, for a model of `shape`."""

    def price(recipe: Recipe) -> Price:
        memory = estimate(recipe, hardware, shape)
        return Price(required_bytes(memory), Timing(memory.sizes).tokens_per_s)

    return price


def suggestions(recipe: Recipe, limit_bytes: int, price: Pricing) -> list[Change]:
    """Single changes that lower what `recipe` needs: those that keep the result first, each group by time.

    None that saves less than WORTHWHILE of it. `fits`: it then needs at most `limit_bytes`.
    """
    now = price(recipe)
    found: list[Change] = []
    for same_result, change in _candidates(recipe):
        fields = change
        if "offload" in change:  # beside what is offloaded already
            fields = {"offload": tuple(dict.fromkeys((*recipe.offload, *change["offload"])))}
        after = _price_with(recipe, fields, price)
        if after is None or now.required_bytes - after.required_bytes < WORTHWHILE * now.required_bytes:
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
    return sorted(found, key=lambda change: (not change.same_result, change.slowdown))


def combined(
    recipe: Recipe, limit_bytes: int, changes: list[Change], price: Pricing
) -> dict[str, Any] | None:
    """The fields of those of `changes` with which the recipe fits `limit_bytes`; None: not even with all.

    They are made one after the other, the cheapest first, each kept if it lowers what is needed; and those
    without which it fits all the same are left out again, the dearest first. Where that is not enough, a
    cheaper change may exclude one that saves more: then each is tried as the first.
    """
    for first in ([], *([change] for change in changes)):
        enough = _enough(recipe, limit_bytes, first, changes, price)
        if enough is not None:
            return enough
    return None


def _enough(
    recipe: Recipe, limit_bytes: int, first: list[Change], changes: list[Change], price: Pricing
) -> dict[str, Any] | None:
    kept = first
    begun = _price_with(recipe, _together(kept), price)
    if begun is None:
        return None
    needed = begun.required_bytes
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
    """The fields of all changes, of two that set the same field the later one's; offloads add up."""
    fields: dict[str, Any] = {}
    for change in changes:
        offload = (*fields.get("offload", ()), *change.fields.get("offload", ()))
        fields |= change.fields
        if offload:
            fields["offload"] = tuple(dict.fromkeys(offload))
    return fields


def _price_with(recipe: Recipe, fields: dict[str, Any], price: Pricing) -> Price | None:
    """The price after a change; None if it breaks a rule, or this model or device cannot have it."""
    try:
        return price(changed(recipe, fields))
    except (ValidationError, InputError):
        return None


def _candidates(recipe: Recipe) -> Iterator[tuple[bool, dict[str, Any]]]:
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
    """Those of `fields` that differ from the recipe, as a shell takes them."""
    differing = {name: value for name, value in fields.items() if value != getattr(recipe, name)}
    return " ".join(f"{name}={_spelled(value)}" for name, value in differing.items())


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):  # brackets mean something to a shell
        names = cast("tuple[str, ...]", value)
        return names[0] if len(names) == 1 else f"'[{','.join(names)}]'"
    return str(value).lower() if isinstance(value, bool) else str(value)
