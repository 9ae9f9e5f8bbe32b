"""What batches of examples of different lengths are like: padding, the worst batch, when it comes.

Rows are drawn without replacement, `rows` to a batch, each batch padded to its longest row: an epoch of a
shuffled data set. Its exchangeability makes everything here exact but grouping by length. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Lengths = NDArray[np.int64]

MEGABATCHES = 4
LARGEST_MEGABATCH = 50
"""Batches; both as get_length_grouped_indices (transformers/trainer_pt_utils.py) has them."""


class Padded(NamedTuple):
    """One epoch."""

    tokens: float
    """Of all rows after padding."""
    padding_share: float
    """Of them."""


def padded_tokens(lengths: Lengths, rows: int) -> Padded:
    """Expected over all orders of the data, the last, smaller batch included. Exact."""
    whole, rest = divmod(len(lengths), rows)
    tokens = whole * rows * expected_longest(lengths, rows) if whole else 0.0
    if rest:
        tokens += rest * expected_longest(lengths, rest)
    there = int(lengths.sum())
    tokens = max(tokens, float(there))  # of one row a batch they are that, but for sums of floats
    return Padded(tokens, 1 - there / tokens)


def expected_longest(lengths: Lengths, rows: int) -> float:
    """The mean of the longest of `rows` rows drawn without replacement: the n-th shortest of N is the longest
    with the chance C(n - 1, rows - 1) / C(N, rows).
    """
    import numpy as np

    ordered, number = np.sort(lengths), len(lengths)
    at_most = np.ones(number + 1)
    for drawn in range(rows):  # all of them among the n shortest, for every n
        at_most *= np.clip(np.arange(number + 1) - drawn, 0, None) / (number - drawn)
    return float((ordered * np.diff(at_most)).sum())


def chance_in_an_epoch(number: int, longer: int, rows: int) -> float:
    """That one of `longer` rows of `number` comes into a batch of `rows`: 1 but for the orders that put all
    of them into what is left over for the last, smaller batch. Exact.
    """
    return 1 - _none_among(number, longer, number - number % rows)


def half_of_epochs_by(number: int, longer: int, rows: int) -> int | None:
    """The batch, counted from 1, by which one of `longer` rows has come in half of all orders. Exact."""
    for batch in range(1, number // rows + 1):
        if 1 - _none_among(number, longer, batch * rows) >= 0.5:
            return batch
    return None


def grouped_padded_tokens(lengths: Lengths, rows: int, seed: int) -> Padded:
    """One epoch grouped by length, shuffled by `seed`."""
    import numpy as np

    order = grouped_order(lengths, rows, np.random.default_rng(seed).permutation(len(lengths)))
    ordered = lengths[order]
    tokens = sum(
        len(batch) * int(batch.max())
        for batch in (ordered[at : at + rows] for at in range(0, len(ordered), rows))
    )
    return Padded(float(tokens), 1 - int(lengths.sum()) / tokens)


def grouped_order(lengths: Lengths, rows: int, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
    """The shuffled rows cut into stretches of some batches, each sorted from its longest, the longest of all
    first: transformers' LengthGroupedSampler (train_sampling_strategy="group_by_length").
    """
    import numpy as np

    stretch = rows * max(1, min(len(lengths) // (rows * MEGABATCHES), LARGEST_MEGABATCH))
    cut = [shuffled[at : at + stretch] for at in range(0, len(lengths), stretch)]
    ordered = [part[np.argsort(-lengths[part], kind="stable")] for part in cut]
    longest = int(np.argmax([lengths[part[0]] for part in ordered]))
    ordered[0][0], ordered[longest][0] = ordered[longest][0], ordered[0][0]
    return np.concatenate(ordered)


def _none_among(number: int, longer: int, drawn: int) -> float:
    """The chance that `drawn` rows of `number` hold none of `longer` ones."""
    import numpy as np

    left = np.arange(longer)
    return float(np.prod(np.clip(number - drawn - left, 0, None) / (number - left)))
