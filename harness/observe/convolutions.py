"""Convolutions as the matrix products that they are ("implicit GEMM"), of which FLOPs and times follow.

NVIDIA's guide "Convolutional Layers" (docs.nvidia.com/deeplearning/performance) has the sizes. A filter
gathers many positions of the larger side, the input, into one of the smaller side, the result. A transposed
convolution goes the other way: its input is the smaller side.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor


class Product(NamedTuple):
    """`batch` products of m x k and k x n, one for each group of channels."""

    m: int
    n: int
    k: int
    batch: int


class Convolution(NamedTuple):
    """One call of aten::convolution or of aten::convolution_backward."""

    smaller: Tensor
    """The result, or the gradient of it; of a transposed convolution the input."""
    larger: Tensor
    weight: Tensor
    """Channels of the smaller side, those of the larger side in a group, and the filter's sizes."""
    groups: int
    makes: str
    """What the call makes, a letter for each: s(maller), l(arger), w(eight)."""

    @classmethod
    def of(cls, name: str, args: Sequence[Any], out: Any) -> "Convolution":
        """`name`: the operator's. `out`: what it returned."""
        if name.endswith("backward"):
            result, input, weight, transposed, groups = args[0], args[1], args[2], args[7], args[9]
            asked = zip("sw" if transposed else "lw", args[10], strict=False)
            makes = "".join(letter for letter, is_asked in asked if is_asked)
        else:
            result, input, weight, transposed, groups = out, args[0], args[1], args[6], args[8]
            makes = "l" if transposed else "s"
        sides = (input, result) if transposed else (result, input)
        return cls(*sides, weight, groups, makes)

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one channel: that is no product, and waits for memory."""
        return self.groups > 1 and self.weight.shape[1] == 1 and self.weight.shape[0] == self.groups

    @property
    def flops(self) -> int:
        """2 for each element of the filters at each position of the smaller side, for each that it makes."""
        positions = self.smaller.shape[0] * prod(self.smaller.shape[2:])
        return 2 * positions * self.weight.numel() * len(self.makes)

    def products(self) -> list[Product]:
        """The products of the call. In the gradient of the larger side, a position meets as many elements of
        the filters as there are for it on average."""
        small, large = (side.shape[0] * prod(side.shape[2:]) for side in (self.smaller, self.larger))
        of_small, of_filter = self.weight.shape[0] // self.groups, prod(self.weight.shape[1:])
        of_large, filter = self.weight.shape[1], prod(self.weight.shape[2:])
        each = {
            "s": Product(small, of_small, of_filter, self.groups),
            "l": Product(large, of_large, max(1, of_small * filter * small // large), self.groups),
            "w": Product(of_small, of_filter, small, self.groups),
        }
        return [each[made] for made in self.makes]
