"""How a kernel of PyTorch walks through its tensors, where that and not the memory decides how fast it is.

An elementwise kernel (ATen/native/cuda/CUDALoops.cuh) reads 16 bytes at a time where all its tensors lie side
by side in the same order. Where one is broadcast, transposed or a part of another, each thread computes the
place of every element; where one has another dtype, it converts element by element. Then the multiprocessors
are what it waits for: harness/kernel_time knows how many bytes a second one of them moves so.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from harness.training import is_dense

Walk = Literal[
    "strided",
    "strided_16",
    "cast",
    "cat",
    "reduction",
    "foreach",
    "dequantize",
    "log_softmax",
    "log_softmax_backward",
]
"""strided_16: with numbers of 16 bits alone. cast: side by side, but of several dtypes. foreach: over lists
of tensors, element by element. dequantize: bitsandbytes' 4-bit weights."""

COPIES = ("copy_", "_to_copy", "clone")
REDUCTIONS = ("sum",)
BY_NAME: dict[str, Walk] = {
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward",
}


def walk_of(func: Any, args: Sequence[Any], out: Any) -> Walk | None:
    """The walk of an operator of PyTorch with result `out`; None for one whose speed is the memory's."""
    space, _, name = func._schema.name.partition("::")
    if space == "aten" and name.startswith("_foreach"):
        return "foreach"
    if name == "dequantize_4bit":
        return "dequantize"
    if space != "aten" or not isinstance(out, Tensor):
        return None
    if name in BY_NAME:
        return BY_NAME[name]
    if name in REDUCTIONS:
        return "reduction"
    if name == "cat":
        return None if all(map(is_dense, args[0])) else "cat"
    if name not in COPIES and torch.Tag.pointwise not in func.tags:
        return None
    tensors = [*_tensors(args), out]
    floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len({_layout(tensor) for tensor in tensors}) > 1 or not all(map(is_dense, tensors)):
        return "strided_16" if all(dtype.itemsize <= 2 for dtype in floats) else "strided"
    if len(floats) < 2:
        return None
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
    narrows = name in COPIES and source.dtype == torch.float32 and target.dtype.itemsize == 2
    return None if narrows else "cast"  # for that there is a kernel that reads 16 bytes at a time


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments; one number counts as a number."""
    return (value for value in values if isinstance(value, Tensor) and value.dim())


def _layout(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and strides of the dimensions that have more than one element."""
    return tuple(each for each in zip(tensor.shape, tensor.stride(), strict=True) if each[0] != 1)
