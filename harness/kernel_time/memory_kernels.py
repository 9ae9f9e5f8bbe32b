"""How long kernels take that memory limits: elementwise, reductions, normalizations, optimizers, copies.

    launch + bytes that the L2 cache holds / its rate + the other bytes / the rate of the device's memory

Small kernels take the time of a launch, medium ones find in the cache what the kernel before has written, and
large ones reach a share of the datasheet's bandwidth that depends on the kind. The cache runs at the clock of
the multiprocessors, so that its rate goes with their FLOP/s and not with the memory's bandwidth. A kind that
was not measured on an architecture takes the share of the kind that is most like it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.kernel_time.numbers import Numbers

LIKE: dict[str, str] = {
    "reduction": "elementwise",
    "embedding": "elementwise",
    "cross_entropy": "softmax",
    "optimizer": "elementwise",
    "dequantize": "elementwise",
    "copy": "elementwise",
    "copy_in": "elementwise",
    "cast_in": "elementwise",
}
"""For a kind that may not have been measured the one that is most like it. copy_in and cast_in are FSDP2's
gradients into one tensor, of one dtype and of bf16 into fp32. Other kinds are norm, and vLLM's gated_vllm and
norm_vllm, which were measured by themselves and run in no recipe."""


class Memory(NamedTuple):
    """The figures of a device that decide how long a kernel takes that memory limits."""

    bytes_per_s: float
    """The datasheet's bandwidth of the device's memory."""
    l2_bytes: float
    fp32_flops_per_s: float
    """The peak of the multiprocessors in fp32, which their number and clock are in."""


def held_bytes(
    numbers: Numbers,
    memory: Memory,
    fitted: Mapping[str, float],
    bytes_moved: Any,
    held_share: float | None = None,
) -> Any:
    """How many of the bytes that one kernel moves are found in the cache: `held_share` of them where it is
    known; else, as in a benchmark that repeats the kernel, all that fit in the cache's `l2_share`, and less
    by `l2_evicted` for each byte beyond, which evicts another before the next kernel reads it."""
    if held_share is not None:
        return held_share * bytes_moved
    room = fitted["l2_share"] * memory.l2_bytes
    beyond = numbers.maximum(0.0, bytes_moved - room)
    return numbers.maximum(0.0, bytes_moved - beyond * (1 + fitted["l2_evicted"]))


def memory_s(
    numbers: Numbers,
    memory: Memory,
    fitted: Mapping[str, float],
    bytes_moved: Any,
    launches: Any = 1,
    held_share: float | None = None,
    scale: float = 1.0,
) -> Any:
    """Seconds of `launches` kernels that move `bytes_moved` together, evenly: `scale` times what was fitted.
    They are no faster than the datasheet's bandwidth lets the bytes pass that the cache does not hold. For
    `held_share` see held_bytes."""
    of_one = bytes_moved / numbers.maximum(launches, 1)
    held = held_bytes(numbers, memory, fitted, of_one, held_share)
    in_cache_s = held / (memory.fp32_flops_per_s * fitted["l2_bytes_per_flop"])
    beyond_s = (of_one - held) / (memory.bytes_per_s * fitted["rate"])
    seconds = (fitted["launch_us"] * 1e-6 + in_cache_s + beyond_s) * scale
    return launches * numbers.maximum(seconds, (of_one - held) / memory.bytes_per_s)
