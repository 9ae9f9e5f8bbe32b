"""How long a kernel takes that waits for memory: elementwise, reductions, normalizations, optimizers, copies.

    launch + bytes that the L2 cache holds / its rate + the other bytes / the rate of the device's memory

Small kernels take a launch's time, middling ones find in the cache what the kernel before has written, and
large ones reach a share of the datasheet's bandwidth that depends on the kind. Kernels that nobody measured
on an architecture take the share of those that are most like them.
"""

from collections.abc import Mapping
from typing import Any

from harness.kernel_time.numbers import Numbers

LIKE: dict[str, str] = {
    "reduction": "elementwise",
    "embedding": "elementwise",
    "cross_entropy": "softmax",
    "optimizer": "elementwise",
    "dequantize": "elementwise",
    "copy": "elementwise",
}
"""A kind that nobody measured, and the one that is most like it. Beside these there are norm, and vLLM's
gated_vllm and norm_vllm, which are measured for what they are and run in no recipe."""


def memory_s(
    numbers: Numbers,
    bytes_per_s: float,
    l2_bytes: float,
    fitted: Mapping[str, float],
    bytes_moved: Any,
    launches: Any = 1,
) -> Any:
    """Seconds of `launches` kernels that move `bytes_moved` together, evenly."""
    each = bytes_moved / numbers.maximum(launches, 1)
    held = numbers.minimum(each, fitted["l2_share"] * l2_bytes)
    one_s = held / (bytes_per_s * fitted["l2_rate"]) + (each - held) / (bytes_per_s * fitted["rate"])
    return launches * (fitted["launch_us"] * 1e-6 + one_s)
