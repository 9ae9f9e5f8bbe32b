"""What one call of an operator costs a device: FLOPs, bytes, and the seconds of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.hardware import Hardware
from harness.kernel_time import KernelKind, memory
from harness.kernels.operator_bytes import operator_bytes
from harness.kernels.operator_time import KernelClass, operator_time
from harness.kernels.operators import operator_of
from harness.kernels.script import Step, Take
from harness.observe import operator_flops


class Cost(NamedTuple):
    """What one operator takes: FLOPs, bytes moved, and the seconds of each."""

    flops: int
    bytes_moved: int
    compute_s: float
    memory_s: float
    before_s: float = 0.0
    """Of memory_s, that of a kernel that is over before the FLOPs begin."""
    kind: KernelKind = "memory"
    """What the estimate of its seconds errs alike in."""
    kernel_class: KernelClass = "elementwise"

    @property
    def seconds(self) -> float:
        """Of all its kernels."""
        return self.before_s + max(self.compute_s, self.memory_s - self.before_s)


NOTHING = Cost(0, 0, 0.0, 0.0)
"""Of what launches no kernel."""


def operator_cost(
    hardware: Hardware, func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step] = ()
) -> Cost:
    """Of one call; NOTHING where no kernel is launched. It follows from the shapes and dtypes of the
    arguments and of `out`, what was returned; `script` is what the kernels take from the allocator. Raises
    InputError for a dtype that the device does not compute in."""
    if func.is_view or not operator_of(func).launches:
        return NOTHING
    flops = operator_flops(func, args, kwargs, out)
    moved = operator_bytes(func, args, kwargs, out, script)
    before = _dequantized_first(func, args, script)
    before_s = memory(hardware, "dequantize", before) if before else 0.0
    took = operator_time(func, args, kwargs, hardware, flops, moved, before)
    compute_s, memory_s = (took.seconds - before_s, before_s) if took.computes else (0.0, took.seconds)
    return Cost(flops, moved, compute_s, memory_s, before_s, took.kind, took.kernel_class)


def _dequantized_first(func: Any, args: Any, script: Sequence[Step]) -> int:
    """Bytes that a 4-bit product moves to bring the weight back to 16 bit, before it multiplies: the packed
    weight read, the whole one written. None when it does so on the fly, in registers."""
    if str(func._overloadpacket) != "bitsandbytes.gemm_4bit":
        return 0
    whole = sum(step.size_bytes for step in script if isinstance(step, Take) and not step.workspace)
    return whole + args[1].nbytes if whole else 0
