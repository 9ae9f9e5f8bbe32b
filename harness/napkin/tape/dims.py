"""The letters that sizes of tensors are written in, as in "B S H": what each stands for, and its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.napkin.model.built_model import BuiltModel


@dataclass(frozen=True)
class Dim:
    meaning: str
    size: Callable[[BuiltModel], int]


DIMS = {
    "B": Dim("micro batch", lambda m: m.recipe.micro_batch_size),
    "S": Dim("sequence", lambda m: m.recipe.seq_len),
    "T": Dim("tokens, B·S", lambda m: _tokens(m)),
    "L": Dim(
        "labels, shifted: of a single row a view of the row with one label more",
        lambda m: _tokens(m) + (m.recipe.micro_batch_size == 1),
    ),
    "M": Dim("rows of an attention mask", lambda m: m.recipe.micro_batch_size),
    "H": Dim("hidden", lambda m: m.shape.hidden),
    "N": Dim("query heads", lambda m: m.shape.heads),
    "G": Dim("key-value heads", lambda m: m.shape.kv_heads),
    "D": Dim("head dimension", lambda m: m.shape.head_dim),
    "W": Dim("queries, keys and values in one, (N + 2G)·D", lambda m: _packed_width(m)),
    "O": Dim("dimensions of a head that are rotated", lambda m: m.shape.rotary_dim),
    "I": Dim("MLP", lambda m: m.shape.intermediate),
    "J": Dim("gate and up in one, 2I", lambda m: 2 * m.shape.intermediate),
    "V": Dim("vocabulary", lambda m: m.shape.vocab),
    "U": Dim("words that a rank's head scores, V / tp", lambda m: m.words),
    "R": Dim("LoRA's rank", lambda m: m.adapter_rank),
    "E": Dim("experts", lambda m: m.shape.experts),
    "X": Dim("experts a token goes to", lambda m: m.shape.experts_per_token),
    "P": Dim("pairs of a token and its expert, T·X", lambda m: _tokens(m) * m.shape.experts_per_token),
}


def _tokens(built: BuiltModel) -> int:
    return built.recipe.micro_batch_size * built.recipe.seq_len


def _packed_width(built: BuiltModel) -> int:
    return (built.shape.heads + 2 * built.shape.kv_heads) * built.shape.head_dim
