"""The terms of the derivation, and the letters for dimensions in their formulas. No torch."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from harness.napkin.weights import BuiltModel


class Term(NamedTuple):
    """One line of the derivation: `size_bytes` is the value of `formula`."""

    section: str
    """The heading under which it is printed; empty until it is known."""
    name: str
    formula: str
    size_bytes: int
    source: str
    """The file or paper that says so, or what keeps the tensor."""


class Dims:
    """The dimensions of a recipe's tensors by letter, and terms that are products of them."""

    def __init__(self, built: BuiltModel) -> None:
        recipe, shape, tp = built.recipe, built.shape, built.recipe.tp
        self.letters = {
            "B": (recipe.rows, "rows of a micro batch"),
            "S": (recipe.seq_len, "sequence"),
            "H": (shape.hidden, "hidden"),
            "N": (-(-shape.heads // tp), "query heads"),
            "G": (-(-shape.kv_heads // tp), "key-value heads"),
            "D": (shape.head_dim, "head dimension"),
            "U": (shape.value_dim or shape.head_dim, "head dimension of values"),
            "K": (shape.kv_rank, "latents of keys and values"),
            "I": (-(-shape.intermediate // tp), "MLP"),
            "E": (shape.experts, "experts"),
            "X": (shape.experts_per_token, "experts a token goes to"),
            "F": (-(-shape.expert_width // tp), "an expert"),
            "J": (-(-shape.shared_width // tp), "the shared expert"),
            "M": (-(-shape.state_heads // tp), "heads with a state"),
            "Z": (-(-shape.state_width // tp), "their width"),
            "Q": (shape.state_dim, "a state"),
            "C": (min(shape.chunk, recipe.seq_len), "tokens worked on at a time"),
            "R": (built.rank, "LoRA's rank"),
            "V": (shape.vocab, "vocabulary"),
        }
        """By letter, the size of the dimension on one rank, and what it counts."""

    def size(self, dim: str) -> int:
        """The size of a dimension: of a letter, or a number as it is."""
        return self.letters[dim][0] if dim in self.letters else int(dim.replace(",", ""))

    def of(self, dims: str) -> int:
        """The number of elements of a tensor with dimensions `dims`, as in B·S·H or B·S·4,096."""
        return prod(map(self.size, dims.split("·")))

    def term(self, name: str, dims: str, width: float, source: str, times: int = 1) -> Term:
        """The term for `times` tensors with dimensions `dims` and `width` bytes an element."""
        one, shown = f"{dims} × {width:.3g} B", "·".join(f"{self.size(dim):,}" for dim in dims.split("·"))
        one += f" = {shown} × {width:.3g} B" if shown != dims else ""
        formula = f"{times} × [{one}]" if times > 1 else one
        return Term("", name, formula, int(times * width * self.of(dims)), source)


def sum_of(terms: Iterable[Term]) -> int:
    """The bytes of all terms together."""
    return sum(term.size_bytes for term in terms)
