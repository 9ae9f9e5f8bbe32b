"""The largest micro batch and sequence that fit a device by arithmetic, and what to change when nothing does.

No torch. fit/confirmed.py finds what fits in a simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness.architecture import ModelShape, load_shape, num_parameters
from harness.errors import InputError
from harness.fit.changes import Change, by_arithmetic, combined, overrides, suggestions
from harness.hardware import Hardware
from harness.napkin import Memory, estimate, sum_of
from harness.recipe import Recipe
from harness.units import in_gib

DEFAULT_MARGIN = 0.05
"""The fraction of the memory that is left to the allocator's fragmentation, which napkin does not know."""
LARGEST_MICRO_BATCH = 2**16
SEQUENCE_STEP = 64
TELLING = 0.01
"""A fraction of the peak. What holds less is not named."""
LARGEST_SEQUENCE = 2**20

FitField = Literal["micro_batch_size", "seq_len"]
MULTIPLES: dict[FitField, int] = {"micro_batch_size": 1, "seq_len": SEQUENCE_STEP}
"""By field, the number whose multiples are tried: sequences that are no multiple of 64 tokens are slow."""
LARGEST: dict[FitField, int] = {"micro_batch_size": LARGEST_MICRO_BATCH, "seq_len": LARGEST_SEQUENCE}
"""By field, the largest value that is tried."""


@dataclass(frozen=True)
class Fit:
    """The sizes of a recipe that fit into `limit_bytes` by arithmetic."""

    limit_bytes: int
    """The device's memory without the margin."""
    required_bytes: int
    """What the recipe needs as it is."""
    micro_batch_size: int
    """The largest at the recipe's seq_len; 0 if not even one row fits."""
    seq_len: int
    """The largest at the recipe's micro_batch_size, a multiple of 64; 0 if none fits."""
    changes: list[Change]
    """Changes to try where the recipe does not fit: those with the same result first, each group by time."""
    together: str = ""
    """Overrides with which it fits, as few and as cheap as were found; empty if there are none."""
    num_parameters: int | None = None
    """The model's parameters, without an adapter."""
    held_back: str = ""
    """What fills the memory at the largest micro batch, or as it is where none fits, with sizes."""


def fit(recipe: Recipe, hardware: Hardware, *, margin: float = DEFAULT_MARGIN) -> Fit:
    """The sizes of `recipe` that fit `hardware` by arithmetic, with `margin` (a fraction) of its memory free.

    Raises InputError for a margin that is not in [0, 1), and for what cannot be estimated.
    """
    limit = usable_bytes(hardware, margin)
    shape = load_shape(recipe.model)
    price = by_arithmetic(hardware, shape)
    needed = price(recipe).required_bytes
    rows, tokens = (
        largest_within(limit, needs_of(recipe, hardware, field, shape), field, shape) for field in MULTIPLES
    )
    changes = suggestions(recipe, limit, price) if needed > limit else []
    fields = combined(recipe, limit, changes, price) if needed > limit else {}
    together = overrides(recipe, fields) if fields else ""
    size = num_parameters(shape, recipe.head_outputs)
    largest_recipe = recipe.model_copy(update={"micro_batch_size": rows or recipe.micro_batch_size})
    memory = estimate(largest_recipe, hardware, shape)
    told_bytes = TELLING * memory.peak.total_bytes
    filled = [f"{in_gib(n)} of {what}" for what, n in parts_at_peak(memory).items() if n >= told_bytes]
    return Fit(limit, needed, rows, tokens, changes, together, size, ", ".join(filled))


def parts_at_peak(memory: Memory) -> dict[str, int]:
    """The bytes of the peak by what they are, in words, the largest first. Tensors as large as the logits are
    apart from other activations and temporaries."""
    loss, peak, name = memory.activations.loss, memory.peak, "logits with their copies and gradients"
    parts = {category.replace("_", " "): size for category, size in peak.held.items()} | {name: 0}
    during = {"the end of the loss": loss.at_end, "the gradient of the logits": loss.in_backward}
    now = during.get(peak.where, [])
    for category, terms in (("activations", loss.kept if now else []), ("temporaries", now)):
        size = sum_of(term for term in terms if "B·S·V" in term.formula)
        parts[category], parts[name] = parts[category] - size, parts[name] + size
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def usable_bytes(hardware: Hardware, margin: float) -> int:
    """The memory of `hardware` less the fraction `margin`. Raises InputError unless that is in [0, 1)."""
    if not 0 <= margin < 1:
        raise InputError(f"--margin {margin}: it must be at least 0 and below 1.")
    return int(hardware.memory_bytes * (1 - margin))


def needs_of(recipe: Recipe, hardware: Hardware, field: FitField, shape: ModelShape) -> Callable[[int], int]:
    """The function from a value of `field` to the bytes that the recipe then needs by arithmetic."""
    return lambda value: estimate(recipe.model_copy(update={field: value}), hardware, shape).required_bytes


def largest_within(limit: int, needs: Callable[[int], int], field: FitField, shape: ModelShape) -> int:
    """The largest multiple of the step of `field` that needs at most `limit` bytes; 0 if none does."""
    step, most = MULTIPLES[field], LARGEST[field]
    if field == "seq_len" and shape.positions:
        most = min(most, shape.positions)
    return step * largest(lambda n: needs(n * step) <= limit, most // step)


def largest(fits: Callable[[int], bool], highest: int) -> int:
    """The largest n in 1..highest that fits; 0 if 1 does not. `fits` must be true up to some n alone."""
    low, high = 0, 1
    while high <= highest and fits(high):
        low, high = high, high * 2
    high = min(high, highest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
