"""Batches of examples of different lengths: how much padding they take, and when the worst batch comes.

An epoch of a shuffled data set draws its rows without replacement, `rows` to a batch, and pads each batch to
its longest row. All orders are equally likely, which makes everything here exact but grouping by length. No
torch. `Lengths` are tokens of each row, shape (number of rows,).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Lengths = NDArray[np.int64]

MEGABATCHES = 4
"""The least number of megabatches (stretches that are sorted by length) in an epoch, if it has the rows."""
LARGEST_MEGABATCH = 50
"""Batches in a megabatch at most. Both are as in get_length_grouped_indices
(transformers/trainer_pt_utils.py).
"""


class Padded(NamedTuple):
    """One epoch of padded batches."""

    tokens: float
    """The tokens of all rows, padding included."""
    padding_share: float
    """The fraction of these tokens that is padding."""


def padded_tokens(lengths: Lengths, rows: int) -> Padded:
    """The expected padding of an epoch over all orders of the data, exact. Its last batch may be smaller."""
    whole, rest = divmod(len(lengths), rows)
    tokens = whole * rows * expected_longest(lengths, rows) if whole else 0.0
    if rest:
        tokens += rest * expected_longest(lengths, rest)
    there = int(lengths.sum())
    tokens = max(tokens, float(there))  # of one row a batch they are that, but for sums of floats
    return Padded(tokens, 1 - there / tokens)


def expected_longest(lengths: Lengths, rows: int) -> float:
    """The expected length, in tokens, of the longest of `rows` rows drawn without replacement.

    The n-th shortest of N rows is the longest with the probability C(n - 1, rows - 1) / C(N, rows).
    """
    import numpy as np

    ordered, number = np.sort(lengths), len(lengths)
    at_most = np.ones(number + 1)
    for drawn in range(rows):  # all of them among the n shortest, for every n
        at_most *= np.clip(np.arange(number + 1) - drawn, 0, None) / (number - drawn)
    return float((ordered * np.diff(at_most)).sum())


def chance_in_an_epoch(number: int, longer: int, rows: int) -> float:
    """The probability that a full batch of `rows` has one of the `longer` rows among `number`. Exact.

    It is below 1 only by the orders that put all of them into the last, smaller batch.
    """
    return 1 - _none_among(number, longer, number - number % rows)


def half_of_epochs_by(number: int, longer: int, rows: int) -> int | None:
    """The batch, counted from 1, by which one of the `longer` rows has come in half of all orders. Exact;
    None where none of them comes in half of all orders."""
    for batch in range(1, number // rows + 1):
        if 1 - _none_among(number, longer, batch * rows) >= 0.5:
            return batch
    return None


def grouped_padded_tokens(lengths: Lengths, rows: int, seed: int) -> Padded:
    """The padding of one epoch that is grouped by length after it was shuffled with `seed`."""
    import numpy as np

    order = grouped_order(lengths, rows, np.random.default_rng(seed).permutation(len(lengths)))
    ordered = lengths[order]
    tokens = sum(
        len(batch) * int(batch.max())
        for batch in (ordered[at : at + rows] for at in range(0, len(ordered), rows))
    )
    return Padded(float(tokens), 1 - int(lengths.sum()) / tokens)


def grouped_order(lengths: Lengths, rows: int, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of rows in which transformers' LengthGroupedSampler reads the `shuffled` row numbers.

    They are cut into stretches of some batches (megabatches), each sorted from its longest row down, and the
    longest row of all comes first (train_sampling_strategy="group_by_length").
    """
    import numpy as np

    stretch = rows * max(1, min(len(lengths) // (rows * MEGABATCHES), LARGEST_MEGABATCH))
    cut = [shuffled[at : at + stretch] for at in range(0, len(lengths), stretch)]
    ordered = [part[np.argsort(-lengths[part], kind="stable")] for part in cut]
    longest = int(np.argmax([lengths[part[0]] for part in ordered]))
    ordered[0][0], ordered[longest][0] = ordered[longest][0], ordered[0][0]
    return np.concatenate(ordered)


def _none_among(number: int, longer: int, drawn: int) -> float:
    """The probability that `drawn` rows of `number` have none of the `longer` ones among them."""
    import numpy as np

    left = np.arange(longer)
    return float(np.prod(np.clip(number - drawn - left, 0, None) / (number - left)))
