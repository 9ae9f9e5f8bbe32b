"""The model's arguments that keep documents in one row from seeing each other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def separate_densely(rows: Sequence[Sequence[int]], additive: torch.dtype | None) -> dict[str, Any]:
    """Arguments of a model with sdpa or eager attention that keep a row's documents from seeing each other.

    `rows` has each row's document lengths, in order; those of every row add up to the same seq_len. Returns
    position_ids (rows, seq_len), which start at 0 in each document, and attention_mask (rows, 1, seq_len,
    seq_len): where a query (third axis) may attend to a key (fourth). transformers passes a 4-D mask on to
    the attention as it is. sdpa takes a mask of bools. eager adds the mask to the scores: with a dtype as
    `additive`, it has 0 or the lowest number of that dtype.
    """
    position_ids = positions(rows)
    document = (position_ids == 0).cumsum(-1)
    mask = (document[:, :, None] == document[:, None, :]).tril_()[:, None]
    if additive is not None:
        lowest = torch.finfo(additive).min
        mask = torch.zeros(mask.shape, dtype=additive).masked_fill_(~mask, lowest)
    return {"position_ids": position_ids, "attention_mask": mask}


def flash_lengths(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of a model with flash attention that, with position_ids, keep a row's documents from seeing
    each other.

    `rows` as in `separate_densely`. For the rows laid end to end, what transformers' FlashAttentionKwargs
    names: cu_seq_lens_q and cu_seq_lens_k, int32 (documents + 1,), and max_length_q and max_length_k, ints.
    """
    lengths = torch.tensor([length for row in rows for length in row])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def positions(rows: Sequence[Sequence[int]]) -> Tensor:
    """position_ids (rows, seq_len), which start at 0 in each document. `rows` as in `separate_densely`.
    Where they do, flex attention's documents begin (transformers/masking_utils.py)."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
