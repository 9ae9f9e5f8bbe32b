"""How long kernels take that memory limits: elementwise, reductions, normalizations, optimizers, copies.

    launch + bytes that the L2 cache holds / its rate + the other bytes / the rate of the device's memory

Small kernels take the time of a launch, medium ones find in the cache what the kernel before has written, and
large ones reach a share of the datasheet's bandwidth that depends on the kind. A kind that was not measured
on an architecture takes the share of the kind that is most like it.
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
"""For a kind that may not have been measured the one that is most like it. Other kinds are norm, and vLLM's
gated_vllm and norm_vllm, which were measured by themselves and run in no recipe."""


def memory_s(
    numbers: Numbers,
    bytes_per_s: float,
    l2_bytes: float,
    fitted: Mapping[str, float],
    bytes_moved: Any,
    launches: Any = 1,
) -> Any:
    """Seconds of `launches` kernels that move `bytes_moved` together, evenly."""
    of_one = bytes_moved / numbers.maximum(launches, 1)
    held = numbers.minimum(of_one, fitted["l2_share"] * l2_bytes)
    one_s = held / (bytes_per_s * fitted["l2_rate"]) + (of_one - held) / (bytes_per_s * fitted["rate"])
    return launches * (fitted["launch_us"] * 1e-6 + one_s)
