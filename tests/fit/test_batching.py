"""What batches of rows are like: by brute force over all orders, and by transformers' own sampler."""

import itertools
import sys

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from harness.fit.batching import (
    chance_in_an_epoch,
    expected_longest,
    grouped_order,
    grouped_padded_tokens,
    half_of_epochs_by,
    padded_tokens,
)

LENGTHS = np.array([3, 5, 5, 8, 13, 21, 2], dtype=np.int64)


def batches_of(order: tuple[int, ...], rows: int) -> list[list[int]]:
    return [[int(LENGTHS[i]) for i in order[at : at + rows]] for at in range(0, len(order), rows)]


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_counted_over_every_order(rows: int) -> None:
    """All 5,040 orders of seven rows."""
    padded = first = 0
    never = 0
    firsts: list[int] = []
    limit = 10  # longer: 13 and 21
    for order in itertools.permutations(range(len(LENGTHS))):
        batches = batches_of(order, rows)
        padded += sum(len(batch) * max(batch) for batch in batches)
        out = [n for n, batch in enumerate(batches, 1) if len(batch) == rows and max(batch) > limit]
        firsts.append(out[0] if out else sys.maxsize)
        never += not out
        first += max(batches[0])
    orders = len(firsts)
    assert padded_tokens(LENGTHS, rows).tokens == pytest.approx(padded / orders)
    assert padded_tokens(LENGTHS, rows).padding_share == pytest.approx(1 - LENGTHS.sum() * orders / padded)
    assert expected_longest(LENGTHS, rows) == pytest.approx(first / orders)
    assert chance_in_an_epoch(len(LENGTHS), 2, rows) == pytest.approx(1 - never / orders)
    half = sorted(firsts)[(orders - 1) // 2]
    assert half_of_epochs_by(len(LENGTHS), 2, rows) == (None if half == sys.maxsize else half)


def test_nothing_longer_never_runs_out() -> None:
    assert chance_in_an_epoch(100, 0, 4) == 0
    assert half_of_epochs_by(100, 0, 4) is None


def test_rows_are_grouped_as_transformers_does() -> None:
    random = np.random.default_rng(3)
    lengths = random.permutation(np.arange(1, 1001)).astype(np.int64)  # all different: no ties to break
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(5)).numpy()
    theirs = get_length_grouped_indices(lengths.tolist(), 8, generator=torch.Generator().manual_seed(5))
    assert grouped_order(lengths, 8, shuffled).tolist() == theirs
    assert grouped_padded_tokens(lengths, 8, 0).padding_share < padded_tokens(lengths, 8).padding_share / 4


@pytest.mark.parametrize("seed", range(8))
def test_one_row_a_batch_has_no_padding_and_never_less(seed):
    lengths = np.random.default_rng(seed).integers(3, 2048, size=2000)
    assert f"{padded_tokens(lengths, 1).padding_share:.1%}" == "0.0%"
