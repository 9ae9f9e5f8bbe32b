"""How far off estimates are of what was kept aside."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def quantiles(ratios: Iterable[float]) -> list[float]:
    """10th and 90th percentile of measured over estimated."""
    found = np.quantile(np.array([*ratios]), [0.1, 0.9])
    return [round(float(each), 4) for each in found]


def spread(errors: Iterable[float]) -> dict[str, Any]:
    """Of errors, without their sign: how many, the median, the 90th percentile, the largest."""
    sizes = sorted(map(abs, errors))
    return {
        "count": len(sizes),
        "median": round(statistics.median(sizes), 4),
        "p90": round(sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], 4),
        "max": round(sizes[-1], 4),
    }


def residuals(measured: Sequence[float], estimated: Sequence[float]) -> dict[str, Any]:
    """Of what was kept aside."""
    ratios = [m / e for m, e in zip(measured, estimated, strict=True)]
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return {
        "count": len(ratios),
        "median": round(statistics.median(errors), 4),
        "p90": round(float(np.quantile(errors, 0.9)), 4),
        "measured_over_estimated": quantiles(ratios),
    }
