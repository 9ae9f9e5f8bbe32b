"""The largest micro batch and sequence that fit a device, and what to change when nothing does. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from harness.architecture import ModelShape, load_shape
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin import Timing, estimate, required_bytes
from harness.recipe import Recipe

DEFAULT_MARGIN = 0.05
"""Fraction of memory left to the caching allocator's fragmentation, which napkin does not know."""
LARGEST_MICRO_BATCH = 2**16
WORTHWHILE = 0.005
"""A change that saves a smaller fraction than this is not suggested."""
SEQUENCE_STEP = 64
LARGEST_SEQUENCE = 2**20

SAME_RESULT: tuple[dict[str, Any], ...] = (
    {"attention": "sdpa"},
    {"loss": "fused_linear"},
    {"optimizer_impl": "fused"},
    {"gradient_checkpointing": True},
    {"optimizer_in_backward": True},
    {"offload": ("activations",)},
    {"offload": ("optimizer",)},
    {"offload": ("parameters",)},
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
    slowdown: float
    """Time a token takes after, over before: below 1 it is faster."""
    fits: bool
    same_result: bool


@dataclass(frozen=True)
class Fit:
    """What fits into `limit_bytes`."""

    limit_bytes: int
    required_bytes: int
    """Of the recipe as it is."""
    micro_batch_size: int
    """The largest at the recipe's seq_len; 0: not even one row fits."""
    seq_len: int
    """The largest at the recipe's micro_batch_size, a multiple of 64; 0: none."""
    changes: list[Change]
    """When the recipe does not fit: what to try, the cheapest first, those with the same result before."""
    together: str = ""
    """Overrides with which it fits, the cheapest changes one after the other; empty: none do."""


def fit(
    recipe: Recipe, hardware: Hardware, *, margin: float = DEFAULT_MARGIN, shape: ModelShape | None = None
) -> Fit:
    """What of `recipe` fits `hardware`, leaving `margin` of its memory to fragmentation.

    Raises InputError for a margin that is not in [0, 1), and for what cannot be estimated.
    """
    if not 0 <= margin < 1:
        raise InputError(f"--margin {margin}: it must be at least 0 and below 1.")
    shape = shape or load_shape(recipe.model)
    limit = int(hardware.memory_bytes * (1 - margin))

    def needs(**fields: Any) -> int:
        changed = recipe.model_copy(update=fields)
        return required_bytes(estimate(changed, hardware, shape))

    needed = needs()
    longest = min(shape.positions or LARGEST_SEQUENCE, LARGEST_SEQUENCE) // SEQUENCE_STEP
    rows = _largest(lambda n: needs(micro_batch_size=n) <= limit, LARGEST_MICRO_BATCH)
    steps = _largest(lambda n: needs(seq_len=n * SEQUENCE_STEP) <= limit, longest)
    fits = needed <= limit
    changes = [] if fits else suggestions(recipe, hardware, limit, shape)
    together = "" if fits else combined(recipe, hardware, limit, changes, shape)
    return Fit(limit, needed, rows, steps * SEQUENCE_STEP, changes, together)


def combined(
    recipe: Recipe, hardware: Hardware, limit: int, changes: list[Change], shape: ModelShape | None = None
) -> str:
    """The changes made one after the other, each kept if it lowers what is needed, until the recipe fits
    `limit` bytes: as overrides; empty if it does not even with all."""
    shape = shape or load_shape(recipe.model)
    fields: dict[str, Any] = {}
    needed = required_bytes(estimate(recipe, hardware, shape))
    for change in changes:
        both = fields | change.fields
        after = _required(_changed(recipe, both), hardware, shape)
        if after is not None and after < needed:
            fields, needed = both, after
        if needed <= limit:
            return _overrides(recipe, fields)
    return ""


def _required(recipe: Recipe | None, hardware: Hardware, shape: ModelShape) -> int | None:
    """What `recipe` needs; None if it is None or this model cannot have it."""
    try:
        return None if recipe is None else required_bytes(estimate(recipe, hardware, shape))
    except InputError:
        return None


def _largest(fits: Callable[[int], bool], highest: int) -> int:
    """The largest n in 1..highest for which `fits`, 0 if 1 does not. `fits` is true up to some n."""
    low, high = 0, 1
    while high <= highest and fits(high):
        low, high = high, high * 2
    high = min(high, highest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def suggestions(
    recipe: Recipe, hardware: Hardware, limit_bytes: int, shape: ModelShape | None = None
) -> list[Change]:
    """Single changes that lower what `recipe` needs: those that keep the result first, each group by time."""
    shape = shape or load_shape(recipe.model)
    now = estimate(recipe, hardware, shape)
    needed, speed = required_bytes(now), Timing(now.sizes).tokens_per_s
    found = []
    for same_result, change in _candidates(recipe):
        fields = change
        if "offload" in change:  # beside what is offloaded already
            fields = {"offload": tuple(dict.fromkeys((*recipe.offload, *change["offload"])))}
        changed = _changed(recipe, fields)
        after = _required(changed, hardware, shape)
        if changed is None or after is None or needed - after < WORTHWHILE * needed:
            continue
        slowdown = speed / Timing(estimate(changed, hardware, shape).sizes).tokens_per_s
        saved, spelled = needed - after, _overrides(recipe, fields)
        found.append(Change(fields, spelled, after, saved, slowdown, after <= limit_bytes, same_result))
    return sorted(found, key=lambda change: (not change.same_result, change.slowdown))


def _candidates(recipe: Recipe) -> Iterator[tuple[bool, dict[str, Any]]]:
    for fields in SAME_RESULT:
        yield True, fields
    if recipe.micro_batch_size > 1:
        rows = recipe.micro_batch_size
        steps = recipe.gradient_accumulation_steps * rows
        yield True, {"micro_batch_size": 1, "gradient_accumulation_steps": steps}
    for fields in OTHER_RESULT:
        yield False, fields
    if recipe.seq_len >= 4 * SEQUENCE_STEP:
        yield False, {"seq_len": recipe.seq_len // 2}


def _changed(recipe: Recipe, fields: dict[str, Any]) -> Recipe | None:
    """The recipe with `fields`, or None if the change breaks a rule."""
    try:
        return Recipe(**{**recipe.model_dump(), **fields})
    except ValidationError:
        return None


def _overrides(recipe: Recipe, fields: dict[str, Any]) -> str:
    differing = {name: value for name, value in fields.items() if value != getattr(recipe, name)}
    return " ".join(f"{name}={_spelled(value)}" for name, value in differing.items())


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):  # brackets mean something to a shell
        return value[0] if len(value) == 1 else f"'[{','.join(value)}]'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    """The device with another amount of memory, for questions about a size and no device."""
    cited = hardware.datasheet.memory_bytes._replace(value=memory_bytes)
    return replace(hardware, datasheet=hardware.datasheet._replace(memory_bytes=cited))


def parse_bytes(text: str) -> int:
    """Bytes from `16GiB` (2**30 each), `16GB` (1e9 each) or a plain number of them, of at least a MiB.

    Raises InputError otherwise.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([KMGT]i?B|B|)\s*", text)
    unit = match[2] if match else ""
    factor = {"": 1, "B": 1} | {
        f"{letter}{i}B": (1024 if i else 1000) ** power
        for power, letter in enumerate("KMGT", start=1)
        for i in ("", "i")
    }
    size = float(match[1]) * factor[unit] if match else 0.0
    if not 1 <= size < float("inf") or (not unit and size < 2**20):  # 16 is no 16 bytes
        raise InputError(
            f"--memory {text}: write a size such as 16GiB (2**30 bytes each) or 16GB (1e9 each)."
        )
    return int(size)
