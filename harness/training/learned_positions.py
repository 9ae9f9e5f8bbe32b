"""Finds the longest sequence that a model with learned position embeddings takes, and refuses longer ones.

A longer one would look up rows that the table does not have. Shape-only tensors do not notice that, a CPU
raises IndexError, and a GPU stops with a device-side assertion.
"""

from typing import Any

from torch import nn

from harness.errors import InputError

NAMES = ("wpe", "position_embedding", "position_embeddings", "embed_positions", "positions_embed")
"""Names that transformers gives to the table, as the last part of its path."""
NOT_OF_TEXT = ("vision", "image", "audio")
"""Words in the paths of tables that are not about positions in a text."""


def learned_positions(model: Any) -> int | None:
    """The longest sequence that the tables of positions in `model` have rows for; None without such a table.

    The tables of OPT and Bart begin with `offset` rows of another use, RoBERTa's with its padding's.
    """
    lengths = []
    for path, module in model.named_modules():
        of_text = path.rpartition(".")[2] in NAMES and not any(word in path for word in NOT_OF_TEXT)
        if of_text and isinstance(module, nn.Embedding):
            padding = -1 if module.padding_idx is None else module.padding_idx
            lengths.append(module.num_embeddings - getattr(module, "offset", padding + 1))
    return min(lengths, default=None)


def refuse_longer_sequences(model: Any, name: str, seq_len: int) -> None:
    """Raise InputError if `seq_len` is more than the model called `name` has learned positions for."""
    positions = learned_positions(model)
    if positions is not None and seq_len > positions:
        raise InputError(
            f"seq_len: {seq_len}: {name} has learned positions for {positions} tokens; set at most that."
        )
