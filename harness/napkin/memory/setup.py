"""What setup holds at most, while the model is made and divided. No torch.

One process makes the model whole, and transformers gives a head that is tied a weight of its own until it is
tied, unless a checkpoint is loaded. Ranks of FSDP2 and of tensor parallelism make it part by part, each whole
before it is divided (harness/parallel/deferred.py): a unit of FSDP2, or one layer after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.napkin.dtypes import SIZES
from harness.napkin.memory.sizes import Sizes
from harness.napkin.model.layers import expert_matrices
from harness.napkin.model.weights import BLOCK_4BIT, Weight, block_weights, outer_weights
from harness.napkin.ranks.parts import packed_part


@dataclass(frozen=True)
class _Made:
    """Bytes of one weight as it is made."""

    name: str
    first: int
    """What is there only until the weight is as it will be used: it in 16 bit before it is quantized, or of
    all ranks before it is divided by tensor parallelism."""
    whole: int
    """As FSDP2 finds it."""
    part: int
    """On the device when it is divided."""
    kept: int
    """Of that, what does not leave for the host."""
    adapter: bool


def setup_peak_bytes(sizes: Sizes, after_setup_bytes: int) -> int:
    """The largest moment of setup, given what is there when it is over."""
    recipe, built = sizes.recipe, sizes.built
    if recipe.parameters_on_host:
        return after_setup_bytes + sizes.quantizing_bytes
    outer, block = _outer(sizes), _block(sizes)
    in_order = _in_order(outer, block, built.shape.layers)
    by_parts = not any(built.quantized(matrix) for matrix in expert_matrices(built.shape))
    if recipe.fsdp and by_parts:
        units = [*[block] * built.shape.layers, *_outer_units(sizes, outer)]
        return max(_peak(units, divided=True), after_setup_bytes)
    if built.tp > 1 and by_parts:
        return max(_peak([in_order], divided=False), after_setup_bytes)
    head = built.head.elements * SIZES[built.made_dtype]
    made_twice = built.shape.tied and recipe.weights == "random"
    tied = [_Made("lm_head", 0, head, head, head, False)] if made_twice else []
    base = [made for made in [*in_order, *tied] if not made.adapter]
    first_divided = sum(made.whole for made in in_order) + sum(made.part for made in block)
    return max(
        _peak([base], divided=False),
        _upcast(sizes),
        recipe.fsdp * first_divided,
        0 if by_parts or recipe.weights == "random" else _experts_loaded(sizes, base),
        after_setup_bytes,
    )


def _experts_loaded(sizes: Sizes, base: Sequence[_Made]) -> int:
    """A checkpoint's experts are all there in 16 bit when the first is quantized."""
    experts = expert_matrices(sizes.built.shape)
    names = {matrix.name for matrix in experts}
    elements = sizes.built.shape.layers * sum(matrix.elements for matrix in experts)
    others = sum(made.whole for made in base if made.name not in names)
    first = max(made.whole for made in base if made.name in names) + max(
        _maxima(sizes, matrix.elements) for matrix in experts
    )
    return others + elements * SIZES[sizes.built.made_dtype] + first


def _maxima(sizes: Sizes, elements: int) -> int:
    """While 4-bit scales are quantized: the maxima, and they less their mean, in fp32."""
    return 2 * SIZES["fp32"] * -(-elements // BLOCK_4BIT) if sizes.built.scales_quantized else 0


def _peak(units: Iterable[Sequence[_Made]], *, divided: bool) -> int:
    """Of units that are made one after the other; `divided`: by FSDP2, each when it is whole."""
    held = peak = 0
    for unit in units:
        whole = 0
        for made in unit:
            peak = max(peak, held + whole + made.first + made.whole)
            whole += made.whole
        if not divided:
            held += whole
            continue
        stay = sum(made.kept for made in unit)
        leaving = max((made.part - made.kept for made in unit), default=0)  # for the host, one at a time
        peak = max(peak, held + whole + stay + leaving)
        held += stay
    return max(peak, held)


def _outer_units(sizes: Sizes, outer: Sequence[_Made]) -> Iterator[list[_Made]]:
    """FSDP2's units beside the blocks (harness/napkin/ranks/units.py)."""
    if sizes.recipe.head_apart and not sizes.built.shape.tied:
        yield [made for made in outer if "embed" in made.name]
        yield [made for made in outer if "embed" not in made.name]
    else:
        yield [*outer]


def _in_order(outer: Sequence[_Made], block: Sequence[_Made], layers: int) -> list[_Made]:
    """As transformers makes the layers: embeddings, blocks, last norm, head."""
    before = [made for made in outer if "embed" in made.name]
    head = [made for made in outer if made.name.startswith("lm_head")]
    between = [made for made in outer if made not in (*before, *head)]
    return [*before, *[*block] * layers, *between, *head]


def _outer(sizes: Sizes) -> list[_Made]:
    whole = outer_weights(replace(sizes.built, recipe=sizes.recipe.model_copy(update={"tp": 1})))
    return [*map(_made, [sizes] * len(whole), whole, outer_weights(sizes.built), sizes.outer)]


def _block(sizes: Sizes) -> list[_Made]:
    """One of the blocks."""
    whole = block_weights(replace(sizes.built, recipe=sizes.recipe.model_copy(update={"tp": 1})))
    made = [*map(_made, [sizes] * len(whole), whole, block_weights(sizes.built), sizes.in_blocks)]
    experts = [n for n, weight in enumerate(whole) if weight.quantized and weight.stacked > 1]
    for n in experts:  # all of a layer are there before one is quantized
        others = sum(whole[other].elements for other in experts if other > n)
        made[n] = replace(made[n], first=made[n].first + others * SIZES[sizes.built.made_dtype])
    return made


def _made(sizes: Sizes, whole: Weight, divided: Weight, part: Weight) -> _Made:
    in_full = whole.elements * SIZES[sizes.built.made_dtype]
    first = in_full if whole.quantized or sizes.built.tp > 1 else 0
    if whole.quantized:
        first += _maxima(sizes, whole.elements)
    as_made = divided.elements * SIZES[sizes.built.made_dtype]
    found = divided.size_bytes if divided.quantized or divided.adapter else as_made
    kept = part.size_bytes
    if sizes.parts_on_host:
        kept -= packed_part(divided, sizes.recipe.dp_shard) if divided.quantized else part.size_bytes
    return _Made(whole.name, first, found, part.size_bytes, kept, whole.adapter)


def _upcast(sizes: Sizes) -> int:
    """While k-bit preparation casts a weight that is not quantized: all others, and it in both dtypes."""
    if sizes.built.loose_dtype == sizes.built.made_dtype:
        return 0
    base = [w for w in [*sizes.outer, *sizes.in_blocks] if not w.adapter]
    largest = max(w.elements for w in base if not w.quantized)
    return sum(w.total_bytes for w in base) + largest * SIZES[sizes.built.made_dtype]
