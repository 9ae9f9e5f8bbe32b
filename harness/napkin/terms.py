"""A line of the derivation, and the letters that sizes are written in. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from harness.architecture import ModelShape
from harness.napkin.layers import inner_of
from harness.recipe import Recipe

MEANINGS = {
    "B": "micro batch",
    "S": "sequence",
    "H": "hidden",
    "N": "query heads",
    "G": "key-value heads",
    "D": "head dimension",
    "I": "MLP",
    "V": "vocabulary",
    "U": "head dimension of values",
    "K": "latents of keys and values",
    "R": "LoRA's rank",
    "E": "experts",
    "X": "experts a token goes to",
    "F": "an expert's width",
    "J": "width of the shared expert",
    "M": "heads of a layer with a state",
    "Z": "width of a layer with a state",
    "Q": "its state",
    "C": "tokens it works on at a time",
}
"""What the letters stand for."""


@dataclass(frozen=True)
class Term:
    """One line of the derivation: `size_bytes` is what `formula` comes to."""

    section: str
    name: str
    formula: str
    size_bytes: int
    source: str


def letters(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """The number behind each letter, on one rank: tensor parallelism divides heads and widths."""
    ranks = recipe.tp

    def share(size: int) -> int:
        return -(-size // ranks)

    return {
        "B": recipe.micro_batch_size,
        "S": recipe.seq_len,
        "H": shape.hidden,
        "N": share(shape.heads),
        "G": share(shape.kv_heads),
        "D": shape.head_dim,
        "U": shape.value_dim or shape.head_dim,
        "I": share(shape.intermediate),
        "V": shape.vocab,
        "K": shape.kv_rank,
        "R": recipe.lora_rank,
        "E": shape.experts,
        "X": shape.experts_per_token,
        "F": share(shape.expert_width),
        "J": share(shape.shared_width),
        "M": share(shape.state_heads),
        "Z": share(inner_of(shape)),
        "Q": shape.state_dim,
        "C": min(shape.chunk, recipe.seq_len) if shape.chunk else 1,
    }


@dataclass(frozen=True)
class Dims:
    """Writes terms whose size is a product of letters."""

    numbers: dict[str, int]

    def elements(self, dims: str) -> int:
        """The product of `dims`, as in B·S·H."""
        return prod(self.numbers[letter] for letter in dims.split("·"))

    def term(self, section: str, name: str, dims: str, width: float, source: str, times: int = 1) -> Term:
        """`times` tensors of `dims`, of `width` bytes an element."""
        shown = "·".join(f"{self.numbers[letter]:,}" for letter in dims.split("·"))
        one = f"{dims} × {width:g} B = {shown} × {width:g} B"
        formula = f"{times} × [{one}]" if times > 1 else one
        return Term(section, name, formula, int(times * width * self.elements(dims)), source)


def sum_of(terms: list[Term]) -> int:
    """Bytes of all of them."""
    return sum(term.size_bytes for term in terms)
