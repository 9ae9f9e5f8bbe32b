"""The time of work that is described as text: the virtual GPU's clock sees operators, products and
collectives pass in C++, and asks here how long they take.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.hardware import GPUS_PER_NODE, NETWORK, Hardware
from harness.kernel_time import CacheRoom, PowerLimit, cache_room, collective, memory, product, transfer
from harness.kernels.cost import accesses, given_results, operator_cost
from harness.kernels.gpu import Gpu
from harness.kernels.operator_time import dtype_of_products, is_convolution
from harness.kernels.operators import operator_of, script_of, unknown_ops
from harness.training import DTYPES


class Estimate(NamedTuple):
    """What all the kernels of one call take together."""

    seconds: float
    kernel_class: str
    """The class under which reports show it: "product", "norm" and so on (KernelClass), or "collective"."""
    flops: int
    is_unknown: bool
    """Whether nobody has looked at these kernels: they count as a launch and the bytes of their arguments."""
    held_s: float = 0.0
    """The seconds if the L2 cache holds all that the kernels move."""
    missed_s: float = 0.0
    """The seconds if it holds nothing; 0 where that makes no difference."""
    accesses: str = ""
    """A letter for each argument in the order of the schema, "|", and one for each result: whether the
    kernels read it (r), write it (w), do both (b), or neither, or only in part (-)."""
    at_limit: float = 0.0
    """The share of `seconds` that is of a device at its power limit (harness/kernel_time/power.py)."""


class Described:
    """Estimates for one device. Its methods raise InputError for a dtype that it does not compute in."""

    def __init__(self, hardware: Hardware, gpus_per_node: int = GPUS_PER_NODE) -> None:
        self.hardware = hardware
        self.gpus_per_node = gpus_per_node
        self._gpu = Gpu.of(hardware, torch.__version__)

    @property
    def bare_s(self) -> float:
        """Seconds of a kernel that moves no bytes: its launch."""
        return memory(self.hardware, "elementwise", 0.0)

    @property
    def cache_room(self) -> CacheRoom:
        """The room in the device's L2 cache."""
        return cache_room(self.hardware)

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes per second of copies between the device and pinned memory of the host."""
        return 1e9 / transfer(self.hardware, 1e9)

    def power_limit(self) -> PowerLimit:
        """What follows how far the power limit slows the program down."""
        return PowerLimit(self.hardware)

    def operator(self, name: str, inputs: str, products: str = "") -> Estimate:
        """The estimate of an operator by name, "aten::add.Tensor", or "aten::mm." for the overload without a
        name. `inputs` is a JSON list of its arguments, a tensor as dtype, device, sizes and strides.
        `products`: the products that it gave to cuBLAS, each as in `product` and followed by ";", which count
        where no formula gives the operator's FLOPs."""
        func = _operator(name)
        args, kwargs = _given(func, [_value(described) for described in json.loads(inputs)])
        if "sparse" in args:  # a tensor that has no strides
            return Estimate(self.bare_s, "unknown", 0, True)
        out = _result(func, args, kwargs)
        script = script_of(func, args, kwargs, out, self._gpu)
        cost = operator_cost(self.hardware, func, args, kwargs, out, script)
        unknown = bool(unknown_ops([func._schema.name]))
        if not cost.flops and products:
            multiplied = [self.product(text) for text in products.rstrip(";").split(";")]
            seconds = max(cost.seconds, sum(estimate.seconds for estimate in multiplied))
            return Estimate(seconds, "product", sum(estimate.flops for estimate in multiplied), unknown)
        estimate = Estimate(max(cost.seconds, self.bare_s), cost.kernel_class, cost.flops, unknown)
        if cost.at_limit:
            estimate = estimate._replace(at_limit=cost.compute_s / estimate.seconds)
        if not cost.bytes_moved:
            return estimate
        held_s = max(cost.held_s, self.bare_s) if cost.missed_s else 0.0
        letters = _letters(func, args, kwargs, out)
        return estimate._replace(held_s=held_s, missed_s=cost.missed_s, accesses=letters)

    def multiplied_in(self, name: str, dtype: str) -> str:
        """What the operator `name` multiplies numbers of `dtype` in: "tf32" for fp32 where allowed."""
        known = DTYPES.get(dtype)
        return dtype if known is None else dtype_of_products(known, self.hardware, is_convolution(name))

    def product(self, text: str) -> Estimate:
        """The estimate of "bf16 M N K BATCH": BATCH products of M x K and K x N."""
        dtype, *sizes = text.split()
        m, n, k, batch = map(int, sizes)
        known = DTYPES.get(dtype)
        computed = "fp16" if known is None else dtype_of_products(known, self.hardware)
        seconds = product(self.hardware, computed, m, n, k, batch)
        return Estimate(seconds, "product", 2 * m * n * k * batch, known is None)

    def alone(self, description: str) -> Estimate:
        """The estimate of work that no operator launched: "product DTYPE M N K BATCH", "collective KIND BYTES
        RANKS" or "kernel NAME"."""
        kind, _, rest = description.partition(" ")
        if kind == "product":
            return self.product(rest.rstrip(";"))
        if kind == "collective":
            name, size_bytes, ranks = rest.split()
            together = min(int(ranks), self.gpus_per_node)
            arguments = self.hardware, name, float(size_bytes), int(ranks), together
            return Estimate(collective(*arguments, network=NETWORK.value), "collective", 0, False)
        return Estimate(self.bare_s, "unknown", 0, True)


def _letters(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> str:
    """See Estimate.accesses."""
    given = {name: "-rwb"[reads + 2 * writes] for name, reads, writes in accesses(func, args, kwargs)}
    results = given_results(func, out if isinstance(out, list | tuple) else (out,))
    of_arguments = "".join(given.get(argument.name, "-") for argument in func._schema.arguments)
    return f"{of_arguments}|{''.join('-' if was_given else 'w' for was_given in results)}"


def _operator(name: str) -> Any:
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def _result(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operator returns for shape-only tensors; () where that depends on their values."""
    special = operator_of(func).result
    if special is not None and (out := special(func, args, kwargs)) is not NotImplemented:
        return out
    try:
        return func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):  # NotImplementedError among them
        return ()


def _given(func: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The operator's positional arguments, and those that have to be passed by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, value in zip(func._schema.arguments, values, strict=False):
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(described: Any) -> Any:
    """A shape-only tensor for a described tensor, and any other argument as it is."""
    if isinstance(described, dict):
        return _tensor(described)
    if isinstance(described, list):
        return [_value(item) for item in described]
    return described


def _tensor(described: dict[str, Any]) -> Tensor:
    """A shape-only tensor for one of the device or of the host, which kernels read too (unified memory)."""
    dtype = getattr(torch, described["dtype"].lower(), torch.uint8)  # C++ says BFloat16, and Char of a byte
    return torch.empty_strided(described["sizes"], described["strides"], dtype=dtype, device="meta")
