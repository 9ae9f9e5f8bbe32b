"""A history as arrays in a page: each is deflated little-endian bytes in base64, which columns.js unpacks."""

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.report.history import History


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array of unsigned integers or float64 as JSON: {"type": "uint16", "data": base64}."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"type": array.dtype.name, "data": base64.b64encode(zlib.compress(little.tobytes(), 6)).decode()}


def history_columns(history: History) -> dict[str, Any]:
    """What the page needs in order to draw a history. Sizes are indices into `sizes`, the different ones.

    Bytes are float64, which is what JavaScript calculates with, and exact up to 2**53.
    """
    sizes, size_index = np.unique(history.change_bytes, return_inverse=True)
    steps = np.flatnonzero(np.diff(history.reserved_bytes, prepend=-1))
    tree = history.tree
    event, bytes_at_peak = history.peak()
    before = history.before
    return {
        "device": history.device,
        "events": history.events,
        "groups": list(history.groups),
        "baseline": history.baseline_bytes.tolist(),
        "sizes": packed(sizes.astype(np.float64)),
        "size": packed(_narrow(size_index)),
        "group": packed(history.group),
        "stack": packed(_narrow(history.stack)),
        "modules": list(history.modules),
        "module": packed(_narrow(history.module)),
        "lines": tree.lines,
        "node_line": packed(np.array(tree.line_of, np.int64).clip(0).astype(np.uint32)),
        "node_parent": packed(np.array(tree.parents, np.uint32)),
        "partner": packed(_narrow(np.where(history.partner < 0, history.events, history.partner))),
        "before": {
            "size": packed(before.size_bytes.astype(np.float64)),
            "group": packed(before.group),
            "stack": packed(_narrow(before.stack)),
            "module": packed(_narrow(before.module)),
            "freed": packed(_narrow(np.where(before.freed < 0, history.events, before.freed))),
        },
        "time_is_estimated": history.time_is_estimated,
        "time_us": None if history.time_us is None else packed(history.time_us.astype(np.float64)),
        "moment": {"event": history.moment()[0], "when": history.when, "ran_out": history.oom is not None},
        "phases": [list(run) for run in history.phases[:MAX_PHASE_RUNS]],
        "reserved_at": packed(steps.astype(np.uint32)),
        "reserved": packed(history.reserved_bytes[steps].astype(np.float64)),
        "peak": {"event": event, "bytes": bytes_at_peak},
    }


MAX_PHASE_RUNS = 5000
"""The most stretches of one phase that are drawn, more than a training has: a browser cannot open a page with
millions of bands."""


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    """The same values in the smallest unsigned type that holds them."""
    most = int(array.max(initial=0))
    return array.astype(np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.uint32)
