"""What one call of an operator costs a device: FLOPs, bytes, and the seconds of its kernels.

Each argument counts as read once and each result as written once, an argument written in place as both, as
the operator's schema says; operators that move fewer bytes declare it (kernels/operators.py). What a kernel
allocates for itself counts as written once and read once.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from harness.hardware import Hardware
from harness.kernel_time import KernelKind, memory
from harness.kernels.operator_time import KernelClass, operator_time
from harness.kernels.operators import operator_of
from harness.kernels.script import Step, Take
from harness.observe import operator_flops

_GRADIENTS = ("g", "grads")
"""Arguments that bitsandbytes' and torch's fused optimizers declare as written. They only read them, except
with a `grad_scale`, by which they are unscaled in place."""


class Access(NamedTuple):
    """What the kernels of an operator do with one of its arguments."""

    name: str
    is_read: bool
    is_written: bool


def accesses(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Access]:
    """What one call does with each of the arguments that it was given, in the order of the schema."""
    operator = operator_of(func)
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if position >= len(args) and argument.name not in kwargs:
            continue
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name in _GRADIENTS and kwargs.get("grad_scale") is None:
            is_written = False
        looked_up = position == 0 and operator.looks_up
        is_read = position != operator.unread and not looked_up and not argument.is_out
        found.append(Access(argument.name, is_read, is_written))
    return found


def operator_bytes(func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step]) -> int:
    """The bytes that one call moves. `out` is what it returned, `script` what its kernels allocate."""
    operator = operator_of(func)
    taken = (step.size_bytes for step in script if isinstance(step, Take) and not step.workspace)
    moved = 2 * sum(taken)
    for position, (name, is_read, is_written) in enumerate(accesses(func, args, kwargs)):
        size_bytes = tensor_bytes(kwargs[name] if name in kwargs else args[position])
        if position == 0 and operator.scatters:
            size_bytes = max(tensor_bytes(other) for other in args[1:])
        moved += size_bytes * (is_read + is_written)
    results = out if isinstance(out, list | tuple) else (out,)
    fresh = [r for r, given in zip(results, given_results(func, results), strict=False) if not given]
    return moved + tensor_bytes(fresh) * ((2 if operator.looks_up else 1) + operator.again)


def given_results(func: Any, results: Sequence[Any]) -> list[bool]:
    """For each result, whether it is an argument (written in place)."""
    returns = func._schema.returns
    if len(returns) == 1 and len(results) > 1:  # one list
        returns = returns * len(results)
    given_back = operator_of(func).given_back
    return [
        position == given_back or (r.alias_info is not None and r.alias_info.is_write)
        for position, r in enumerate(returns)
    ]


def tensor_bytes(values: Any) -> int:
    """Bytes of the tensors in `values`. An expanded tensor is read once."""
    if isinstance(values, Tensor):
        elements = values.numel()
        if 0 in values.stride():
            elements = prod(
                size for size, stride in zip(values.shape, values.stride(), strict=True) if stride
            )
        return elements * values.element_size()
    if isinstance(values, list | tuple):
        return sum(tensor_bytes(value) for value in values)
    return 0


class Cost(NamedTuple):
    """What one call of an operator takes: FLOPs, bytes moved, and the seconds of each."""

    flops: int
    bytes_moved: int
    compute_s: float
    memory_s: float
    before_s: float = 0.0
    """The part of memory_s that a first kernel takes, which has ended when the FLOPs begin."""
    kind: KernelKind = "memory"
    """Decides how uncertain the seconds are: estimates of one kind err alike."""
    kernel_class: KernelClass = "elementwise"
    held_s: float = 0.0
    """memory_s if the L2 cache holds all that is moved."""
    missed_s: float = 0.0
    """memory_s if it holds nothing; 0 for products and attention, whose seconds have the cache in them."""
    at_limit: bool = False
    """Whether compute_s is that of a device at its power limit (harness/kernel_time/power.py)."""

    @property
    def seconds(self) -> float:
        """The seconds of all its kernels."""
        return self.before_s + max(self.compute_s, self.memory_s - self.before_s)


NOTHING = Cost(0, 0, 0.0, 0.0)
"""The cost of an operator that launches no kernel."""


def operator_cost(
    hardware: Hardware, func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step] = ()
) -> Cost:
    """The cost of one call; NOTHING where no kernel is launched. It follows from the shapes and dtypes of the
    arguments and of `out`, what was returned; `script` is what the kernels take from the allocator. Raises
    InputError for a dtype that the device does not compute in."""
    if func.is_view or not operator_of(func).launches:
        return NOTHING
    flops = operator_flops(func, args, kwargs, out)
    moved = operator_bytes(func, args, kwargs, out, script)
    before = _dequantized_first(func, args, script)
    before_s = memory(hardware, "dequantize", before) if before else 0.0
    took = operator_time(func, args, kwargs, out, hardware, flops, moved, before)
    compute_s, memory_s = (took.seconds - before_s, before_s) if took.computes else (0.0, took.seconds)
    cost = Cost(
        flops, moved, compute_s, memory_s, before_s, took.kind, took.kernel_class, at_limit=took.at_limit
    )
    if not moved or took.kind != "memory":
        return cost
    held_s, missed_s = (
        memory(hardware, took.timed_as, moved, held_share=share, elements=took.elements)
        for share in (1.0, 0.0)
    )
    return cost._replace(held_s=held_s, missed_s=missed_s)


def _dequantized_first(func: Any, args: Any, script: Sequence[Step]) -> int:
    """The bytes that a 4-bit product moves to dequantize its weight before it multiplies: it reads the packed
    weight and writes the 16-bit one. 0 where it dequantizes in registers, as it multiplies."""
    if str(func._overloadpacket) != "bitsandbytes.gemm_4bit":
        return 0
    whole = sum(step.size_bytes for step in script if isinstance(step, Take) and not step.workspace)
    return whole + args[1].nbytes if whole else 0
