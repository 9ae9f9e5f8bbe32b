"""The buffers of CUDA's sorts and reductions, and of Liger's loss, whose sizes are no polynomials: a rule
computes each.

CUB asks its caller for one scratch buffer. Its size follows from cub's tuning tables: how many elements one
thread block handles ("tile"), which kernels/sorting.py reads from them. Files and lines are those
of CCCL 3.0.1, under cub/cub, which CUDA 13.0 brings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from harness.units import ceil_div, round_up

ALIGNMENT = 256  # util_temporary_storage.cuh, 80: each part of a scratch buffer starts at a multiple of it
RADIX_BITS = 8
# SingleTilePolicy: 256 threads of 19 (device/dispatch/tuning/tuning_radix_sort.cuh, 957)
SINGLE_TILE = 256 * 9
ROWS_PER_THREAD = 10  # NROWS_PER_THREAD in native/cuda/EmbeddingBackwardKernel.cu


class Ruled(int):
    """A number of bytes that remembers the rule that computed it, and the arguments of that rule."""

    rule: str
    """The name of a function in RULES."""
    arguments: tuple[int, ...]


RULES: dict[str, Callable[..., Ruled]] = {}
"""The rules by name: functions of whole numbers that each return a Ruled, in bytes."""


def rule(function: Callable[..., int]) -> Callable[..., Ruled]:
    """A decorator that adds `function` to RULES and makes it return a Ruled."""

    @wraps(function)
    def ruled(*arguments: int) -> Ruled:
        found = Ruled(function(*arguments))
        found.rule, found.arguments = function.__name__, arguments
        return found

    RULES[function.__name__] = ruled
    return ruled


def scratch(*parts_bytes: int) -> int:
    """Bytes of one buffer for all parts, each aligned to 256 B, as is the first (cub's AliasTemporaries)."""
    return sum(round_up(part, ALIGNMENT) for part in parts_bytes) + ALIGNMENT - 1


@rule
def radix_sort_scratch(count: int, bits: int, tile: int) -> int:
    """Scratch of DeviceRadixSort::SortPairs: `count` 8-byte keys with 8-byte values, by their lowest `bits`.

    Onesweep (device/dispatch/dispatch_radix_sort.cuh, 480-491): a histogram of 256 64-bit bins per pass, one
    row of 256 32-bit counters per tile, for several passes the second half of the two double buffers, one
    counter per pass.
    """
    if count <= SINGLE_TILE:
        return 1
    passes, bins = ceil_div(bits, RADIX_BITS), 2**RADIX_BITS
    buffer = count * 8 if passes > 1 else 0
    return scratch(passes * bins * 8, ceil_div(count, tile) * bins * 4, buffer, buffer, passes * 4)


@rule
def radix_sort_rows_scratch(count: int, rows: int, tile: int) -> int:
    """`radix_sort_scratch` of keys that are numbers of rows, of which there are `rows`."""
    return radix_sort_scratch(count, rows.bit_length(), tile)


@rule
def scan_scratch(count: int, item_bytes: int, tile: int) -> int:
    """Scratch of DeviceScan: a state per tile and 32 of padding (agent/single_pass_scan_operators.cuh, 626).

    A state is a value and a flag in one word of twice the item's size; a second part of a byte is aligned up.
    """
    return scratch((ceil_div(count, tile) + 32) * 2 * item_bytes, 1)


@rule
def select_scratch(count: int, tile: int) -> int:
    """Scratch of DeviceSelect: that of a scan whose items have two words, without the scan's second part."""
    return scratch((ceil_div(count, tile) + 32) * 16)


@rule
def count_scratch(count: int, most_blocks: int) -> int:
    """Scratch of DeviceReduce::Sum of ints: a partial sum for each of the `most_blocks` thread blocks that
    can run at once, or none where one thread block adds up everything (device/dispatch/dispatch_reduce.cuh;
    tuning_reduce.cuh: 256 threads of 16 items)."""
    return 1 if count <= 256 * 16 else scratch(most_blocks * 4)


@rule
def embedding_pieces(count: int, weights: int, row_bytes: int) -> int:
    """Bytes of the embedding backward's partial sums, one row for each run of at most 10 equal indices.

    There is room for as many rows as there may be distinct indices among `count`, and for a tenth of `count`.
    """
    return (count // ROWS_PER_THREAD + min(count, weights)) * row_bytes


@rule
def at_most(count: int, most: int, item_bytes: int) -> int:
    """Bytes of `count` items, but of at most `most`."""
    return min(count, most) * item_bytes


@rule
def scan_scratch_at_most(count: int, most: int, item_bytes: int, tile: int) -> int:
    """`scan_scratch` of `count` items, but of at most `most`."""
    return scan_scratch(min(count, most), item_bytes, tile)


@rule
def liger_logits(tokens: int, words: int, hidden_size: int, item_bytes: int) -> int:
    """Bytes of the logits of one chunk of tokens, of which Liger's loss keeps one chunk's at a time: a power
    of two of tokens, such that they are about as large as the hidden states of all (liger_kernel/ops/
    fused_linear_cross_entropy.py, chunk_size)."""
    least = ceil_div(tokens, ceil_div(words, hidden_size))
    return min(1 << (least - 1).bit_length(), tokens) * words * item_bytes


MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256  # native/cuda/Reduce.cuh, setReduceConfig


@rule
def reduction_staging(inputs: int, step: int, free_blocks: int, block_bytes: int) -> int:
    """Bytes in which thread blocks that share one output leave partial sums; 0 if one block does it all.

    native/cuda/Reduce.cuh, setReduceConfig: an output has `inputs` inputs, of which a thread block takes
    `step` at a time; the device has room for `free_blocks` thread blocks per output.
    """
    values = ceil_div(inputs, step)
    least = ceil_div(values, MAX_VALUES_PER_THREAD)
    blocks = max(min(free_blocks, ceil_div(values, MIN_VALUES_PER_THREAD)), least)
    return blocks * block_bytes if blocks > 1 else 0
