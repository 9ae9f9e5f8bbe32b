"""The model's arguments that keep documents in one row from seeing each other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def separate_densely(rows: Sequence[Sequence[int]], additive: torch.dtype | None) -> dict[str, Any]:
    """Model arguments of sdpa and eager attention under which the documents of a row cannot see each other.

    `rows` holds each row's document lengths, in order, every row adding up to the same seq_len.
    Returns position_ids (rows, seq_len), restarting at each document, and attention_mask
    (rows, 1, seq_len, seq_len): where a query (third axis) may attend to a key (fourth). transformers hands
    a 4-D mask to the attention as it is. sdpa takes a bool mask; eager adds the mask to the scores, so
    with a dtype in `additive` it holds 0 or the lowest number of that dtype.
    """
    position_ids = _position_ids(rows)
    document = (position_ids == 0).cumsum(-1)
    mask = (document[:, :, None] == document[:, None, :]).tril_()[:, None]
    if additive is not None:
        lowest = torch.finfo(additive).min
        mask = torch.zeros(mask.shape, dtype=additive).masked_fill_(~mask, lowest)
    return {"position_ids": position_ids, "attention_mask": mask}


def separate_for_flash(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Model arguments of flash attention under which documents cannot see each other.

    `rows` is as above. Returns position_ids (rows, seq_len) and, over the rows laid end to end,
    cu_seq_lens_q and cu_seq_lens_k (documents + 1,), int32, and max_length_q and max_length_k, ints: what
    transformers' FlashAttentionKwargs names.
    """
    return {"position_ids": _position_ids(rows), **flash_lengths(rows)}


def flash_lengths(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What `separate_for_flash` returns beside position_ids."""
    lengths = torch.tensor([length for row in rows for length in row])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _position_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
