"""What attention computes where a mask leaves out keys, held against masks that are counted."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from harness.data.rows import synthetic_rows
from harness.kernel_time import causal_length
from harness.recipe import check_recipe
from harness.simulate.cuda.flex_attention import BLOCK, seen_blocks

TINY: dict[str, Any] = {"model": "smoke", "packing": True}


def _blocks(lengths: list[int], window: int | None, chunk: int | None) -> int:
    """The blocks of scores that PyTorch itself finds, of rows of documents that lie end to end."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        allowed = (query >= key) & (documents[query] == documents[key])
        if window is not None:
            allowed &= key > query - window
        return allowed if chunk is None else allowed & (query // chunk == key // chunk)

    size = sum(lengths)
    mask = create_block_mask(seen, None, None, size, size, device="cpu")
    full = 0 if mask.full_kv_num_blocks is None else int(mask.full_kv_num_blocks.sum())
    return int(mask.kv_num_blocks.sum()) + full


@pytest.mark.parametrize(
    ("documents", "window", "chunk"),
    [
        (None, None, None),
        (200, None, None),
        (900, None, None),
        (None, 512, None),
        (None, 1000, None),
        (None, None, 1024),
        (700, 512, None),
    ],
)
def test_flex_attention_computes_the_blocks_that_pytorch_finds(
    documents: int | None, window: int | None, chunk: int | None
) -> None:
    """Of documents of equal length, a window and chunks: within a twentieth of the blocks counted."""
    size = 6144
    each = documents or size
    lengths = [each] * (size // each) + ([size % each] if size % each else [])
    seen = seen_blocks(size, each, window, chunk)
    in_blocks = size / BLOCK * (seen / BLOCK + 1) / 2  # those of a causal sequence, its diagonal with them
    assert in_blocks == pytest.approx(_blocks(lengths, window, chunk), rel=0.05)


@pytest.mark.parametrize("window", [100, 1000, 4000])
def test_a_window_counts_as_the_causal_length_with_as_many_scores(window: int) -> None:
    size = 4096
    queries = torch.arange(size)
    keys = (queries + 1).clamp(max=window).sum().item()
    assert keys / size - 1 <= causal_length(size, window) / 2 <= keys / size + BLOCK / 2
    assert causal_length(size, None) == causal_length(size, size) == size


def test_documents_of_synthetic_rows_are_as_long_as_the_recipe_says() -> None:
    recipe = check_recipe(TINY | {"seq_len": 3000}, "test")
    rows = synthetic_rows(recipe, 100, recipe.seq_len)
    lengths = np.concatenate([rows.lengths(number) for number in range(300)])
    in_the_mean = (lengths.astype(float) ** 2).sum() / lengths.sum()
    assert recipe.document_tokens == pytest.approx(in_the_mean, rel=0.02)
    assert check_recipe(TINY | {"packing": False, "seq_len": 3000}, "test").document_tokens == 3000
