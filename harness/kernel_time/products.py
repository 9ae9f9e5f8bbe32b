"""How long a matrix product takes: by its tiles, their waves over the multiprocessors, and its memory
traffic.

A product of m x k and k x n is cut into tiles of the result, and a tile's k into `splits` that are added up
afterwards. The multiprocessors work the tiles off in waves; the last wave is seldom full. A tile takes the
time of its multiply-adds, at the rate that its size reaches, and a start and an end that do not depend on k.
The time is no less than that of the memory traffic: both factors are read at least once, and again for each
wave that the L2 cache does not serve. A product that lasts long brings the device to its power limit, which
lowers the clock. cuBLAS chooses tiles and splits by rules of its own, nearly the fastest ones: the estimate
is a mean over all of them, weighted steeply toward the fastest.

The idea is that of NVIDIA's guide "Matrix Multiplication Background" (tile and wave quantization). The
parameters are fitted by benchmarks/time/fit.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.kernel_time.numbers import Numbers

Tile = tuple[int, int, int]
Sizes = tuple[Any, Any, Any, Any]
"""m, n, k and batch of `batch` products of m x k and k x n."""
TILES: tuple[Tile, ...] = (
    (256, 128, 1),
    (128, 256, 1),
    (128, 128, 1),
    (256, 64, 1),
    (64, 256, 1),
    (128, 64, 1),
    (64, 128, 1),
    (64, 64, 1),
    (128, 128, 2),
    (128, 64, 2),
    (64, 128, 2),
    (64, 64, 3),
    (128, 192, 1),
    (192, 128, 1),
)
"""Rows and columns of the result that one block makes, and how many blocks share a multiprocessor."""
SPLITS = (1, 2, 3, 4, 6, 8)
"""Into how many parts a tile's k may be cut."""
GLOBALS = (
    "launch_us",
    "tile_start_us",
    "tile_end_us",
    "memory_fraction",
    "smooth",
    "power_slowdown",
    "power_ms",
    "split_fraction",
    "overlap",
    "swizzle",
    "alone",
    "split_us",
    "l2_share",
    "choice",
    "quiet",
)
"""An architecture's parameters besides the rate of each tile; each is explained where it is used."""


class Chip(NamedTuple):
    """The figures of a device that decide how long a product takes."""

    sm_count: int
    flops_per_s: float
    """Dense peak in the product's dtype."""
    bytes_per_s: float
    l2_bytes: float


def tile_name(tile: Tile) -> str:
    """The key of a tile's rate in the parameters: "128x64x2"."""
    return "x".join(map(str, tile))


def product_s(
    numbers: Numbers,
    chip: Chip,
    fitted: Mapping[str, Any],
    m: Any,
    n: Any,
    k: Any,
    batch: Any,
    *,
    element_bytes: float = 2.0,
    result_bytes: float = 2.0,
    sustained: bool = False,
    quiet: Any = 0.0,
) -> Any:
    """Seconds of `batch` products of m x k and k x n. `fitted` has GLOBALS and `tiles`: by `tile_name` the
    share of the peak that the tile reaches. `element_bytes`: of an element of the factors; `result_bytes`: of
    the result.

    `sustained`: the device has been at work for long, as in a training step, and is at its power limit
    whatever this product takes by itself. `quiet` (0 or 1): one factor is nearly all zeros, which takes less
    power, so that the clock stays higher.
    """
    log, exp = numbers.log, numbers.exp
    factors = element_bytes * batch * k * (m + n)
    result = result_bytes * batch * m * n
    missed = numbers.maximum(0.0, 1.0 - fitted["l2_share"] * chip.l2_bytes / factors)
    memory_rate = chip.bytes_per_s * fitted["memory_fraction"]
    candidates: list[Any] = []
    for tile in TILES:
        rate = fitted["tiles"].get(tile_name(tile), 0.0)
        if rate <= 0:
            continue
        for splits in SPLITS:
            busy = _busy_s(numbers, chip, fitted, tile, splits, rate, (m, n, k, batch))
            read = element_bytes * _read_again(numbers, chip, fitted, tile, splits, (m, n, k, batch))
            again = numbers.maximum(read, factors)
            memory = (factors + (again - factors) * missed + result) / memory_rate
            larger = numbers.maximum(busy, memory)
            power = 1 + fitted["overlap"]
            seconds = larger * ((busy / larger) ** power + (memory / larger) ** power) ** (1 / power)
            if splits > 1:  # partial sums in fp32 are written, and read to be added up
                sums = 4.0 * (splits + 1) * batch * m * n
                seconds = seconds + sums / (chip.bytes_per_s * fitted["split_fraction"])
                seconds = seconds + fitted["split_us"] * 1e-6
            candidates.append(seconds)
    fastest = candidates[0]
    for seconds in candidates[1:]:
        fastest = numbers.minimum(fastest, seconds)
    weights = total = 0.0
    for seconds in candidates:
        slower = log(seconds / fastest)
        weight = exp(-fitted["choice"] * slower)
        weights, total = weights + weight, total + weight * slower
    took = fitted["launch_us"] * 1e-6 + fastest * exp(total / weights)
    long = 1.0 if sustained else took / (took + fitted["power_ms"] * 1e-3)
    return took * (1 + fitted["power_slowdown"] * long) * (1 - quiet * (1 - fitted["quiet"]))


def _busy_s(
    numbers: Numbers, chip: Chip, fitted: Mapping[str, Any], tile: Tile, splits: int, rate: Any, sizes: Sizes
) -> Any:
    """Seconds that the multiprocessor with the most tiles computes."""
    (rows, columns, together), (m, n, k, batch) = tile, sizes
    tiles = numbers.ceil(m / rows) * numbers.ceil(n / columns) * batch * splits
    one_s = 2.0 * rows * columns * (k / splits) * chip.sm_count / (chip.flops_per_s * rate)
    waves = numbers.ceil(tiles / (chip.sm_count * together) - 1e-9)
    by_one = numbers.ceil(tiles / chip.sm_count - 1e-9)
    rest = by_one - (waves - 1.0) * together
    # blocks that have a multiprocessor for themselves use `alone` of what the others leave idle
    alone = 1 / (1 + fitted["alone"])
    last = rest + (together - rest) * alone
    counted = (waves - 1.0) * together + last
    fewest = 1.0 + (together - 1) * alone
    # multiprocessors do not wait for each other between waves: some of the quantization is smoothed out
    smooth = fitted["smooth"] / (1 + fitted["smooth"])
    counted = counted * (1 - smooth) + smooth * numbers.maximum(tiles / chip.sm_count, fewest)
    around_s = (fitted["tile_start_us"] + fitted["tile_end_us"] * rows * columns / 16384) * 1e-6
    return numbers.maximum(counted, 1.0) * one_s + waves * around_s


def _read_again(
    numbers: Numbers, chip: Chip, fitted: Mapping[str, Any], tile: Tile, splits: int, sizes: Sizes
) -> Any:
    """How many elements of both factors the waves read when the cache keeps nothing from one wave to the
    next: a wave is `swizzle` tiles high and as wide as its number of tiles allows."""
    (rows, columns, together), (m, n, k, batch) = tile, sizes
    down, across = numbers.ceil(m / rows), numbers.ceil(n / columns)
    at_once = numbers.minimum(down * across * splits, float(chip.sm_count * together))
    high = numbers.minimum(down, 1 + fitted["swizzle"])
    wide = numbers.maximum(1.0, numbers.minimum(across, at_once / high))
    return batch * down * across * k * (rows / wide + columns / high)
