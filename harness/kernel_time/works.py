"""The time of work that is described by FLOPs and bytes (harness/hardware, `Work`), one after the other."""

from collections import defaultdict
from collections.abc import Iterable

from harness.hardware import Hardware, Time, Work
from harness.kernel_time.estimates import (
    ALIGNED_BYTES,
    KernelKind,
    bound_s,
    cache_room,
    memory,
    product,
    range_of,
    unaligned_product,
)
from harness.kernel_time.fused_attention import BACKWARD
from harness.kernel_time.parameters import attention_architecture, fitted_attention

IN_CACHE = 1 / 3
"""Of three passes over a byte (it is written once and read twice) one reads what was written just before."""
LONG = 4096
"""The length in tokens that is taken for attention, of which `Work` has FLOPs only."""
USUAL_HEAD = "128"
"""The head size that is taken for it, as `fitted_attention` writes it."""


def time_of(works: Iterable[Work], hardware: Hardware) -> Time:
    """Time of `works`, one after the other.

    Never less than total FLOPs over peak nor total bytes over bandwidth, for no kernel is faster than its
    roofline. Raises InputError for a dtype that the device does not compute in.
    """
    by_kind: dict[KernelKind, float] = defaultdict(float)
    compute = waiting = host = computing = 0.0
    for work in works:
        moved_bytes = work.bytes_moved - work.before_bytes
        before_s = memory(hardware, "dequantize", work.before_bytes) if work.before_bytes else 0.0
        by_kind["memory"] += before_s
        memory_s = _memory_s(work, moved_bytes, hardware)
        kind, seconds = _kernel(work, moved_bytes, hardware) if work.flops else ("memory", memory_s)
        by_kind[kind] += seconds
        if work.flops and seconds > memory_s:
            compute += seconds
            computing += seconds
        elif work.flops:
            compute += bound_s(hardware, work.flops, 0, work.dtype)
        waiting += before_s + memory_s
        host += work.operators * hardware.calibration.host_op_s
    low = sum(seconds * range_of(hardware, kind).low for kind, seconds in by_kind.items())
    high = sum(seconds * range_of(hardware, kind).high for kind, seconds in by_kind.items())
    return Time(sum(by_kind.values()), compute, waiting, host, computing, (low, high))


def _kernel(work: Work, moved_bytes: int, hardware: Hardware) -> tuple[KernelKind, float]:
    """The kind of the kernels of work with FLOPs, whose estimates err alike, and their seconds.
    `moved_bytes`: without those that a first kernel moves before the FLOPs begin.
    """
    least = bound_s(hardware, work.flops, moved_bytes, work.dtype)
    if work.kind == "attention":
        return "attention", max(least, _attention_s(work, hardware))
    if work.shape is not None:
        m, n, k, batch = work.shape
    else:
        side = max(1, round((work.flops / max(1, work.operators) / 2) ** (1 / 3)))
        m, n, k, batch = side, side, side, 1
    one_s = product(hardware, work.dtype, m, n, k, batch)
    if work.dtype in ("bf16", "fp16") and any(columns * 2 % ALIGNED_BYTES for columns in (n, k)):
        one_s = max(one_s, unaligned_product(hardware, 2 * m * n * k * batch))
    return "product", max(least, one_s * work.flops / (2 * m * n * k * batch))


def _memory_s(work: Work, moved_bytes: int, hardware: Hardware) -> float:
    """Seconds of moving bytes by kernels one after the other in a step. Of what each moves the L2 cache holds
    at most a part, IN_CACHE, which the one before has written."""
    if not moved_bytes:
        return 0.0
    launches = max(1, work.operators)
    share = min(IN_CACHE, cache_room(hardware).size_bytes * launches / moved_bytes)
    return memory(hardware, work.walk, moved_bytes, launches, share, work.elements)


def _attention_s(work: Work, hardware: Hardware) -> float:
    """Seconds of attention under a causal mask: `work.flops` counts the whole square of scores, of which half
    is computed. Forward and backward share one rate, the mean of theirs, weighted as in a step."""
    fraction = hardware.calibration.attention_fraction
    if fraction is not None:
        return work.flops / (hardware.peak_flops(work.dtype) * fraction)
    capability = attention_architecture(hardware)
    slow = 0.0
    for direction, share in (("forward", 1 / (1 + BACKWARD)), ("backward", BACKWARD / (1 + BACKWARD))):
        found = fitted_attention(capability, "flash2", direction)
        size = USUAL_HEAD if USUAL_HEAD in found else next(iter(found))
        slow += share / found[size]["rate"] * (1 + found[size]["short_causal"] / LONG)
    seconds = work.flops / 2 / hardware.peak_flops(work.dtype) * slow
    return seconds * hardware.calibration.attention_scale
