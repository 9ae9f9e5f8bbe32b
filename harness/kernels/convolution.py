"""Convolutions and triangular systems: what they allocate inside on CUDA.

The order of the allocations is the one that PyTorch's CUDA build shows, called alone on a virtual GPU.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from harness.kernels.operators import kernel
from harness.kernels.script import Script, size_of

POINTER_BYTES = 8
DENSE = "whose plan cuDNN chooses"
"""Describes the convolutions whose memory is not known (`Unknown.how`)."""


def _depthwise(input: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    """native/Convolution.cpp, is_depthwise and use_cudnn_depthwise: whether each group has one channel and
    the kernel has one dimension, as in the short convolutions of recurrent layers."""
    channels = input.shape[1]
    return not transposed and groups == channels > 1 and weight.shape[0] % channels == 0 and weight.dim() == 3


@kernel("convolution")
def convolution(script: Script, input: Tensor, weight: Tensor, transposed: bool, groups: int) -> None:
    """cuda/DepthwiseConv2d.cu, conv_depthwise2d_cuda: contiguous input."""
    if not _depthwise(input, weight, transposed, groups):
        script.unknown(DENSE)
        return
    copy = None if input.is_contiguous() else script.take(size_of(input))
    script.output(0)
    script.free(copy)


@kernel("convolution_backward")
def convolution_backward(
    script: Script,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    transposed: bool,
    groups: int,
    outputs: Sequence[Any],
) -> None:
    """native/Convolution.cpp, convolution_backward, and cuda/DepthwiseConv2d.cu, conv_depthwise2d_backward:
    the gradient of the weight comes first, that of the bias is a sum at the end."""
    if not _depthwise(input, weight, transposed, groups):
        script.unknown(DENSE)
        return
    inputs = None if input.is_contiguous() else script.take(size_of(input))
    gradients = None if grad_output.is_contiguous() else script.take(size_of(grad_output))
    present = [index for index in (1, 0, 2) if isinstance(outputs[index], Tensor)]
    script.output(*(index for index in present if index < 2))
    script.free(gradients)
    script.output(*(index for index in present if index == 2))
    script.free(inputs)


@kernel("linalg_solve_triangular")
def solve_triangular(script: Script, self: Tensor, left: bool) -> None:
    """native/cuda/linalg/BatchLinearAlgebra.cpp, triangular_solve_kernel: cuBLAS' batched routine reads the
    addresses of the matrices from the device, except for few and large ones."""
    if not left:
        script.unknown("from the right")
        return
    script.output(0)
    count = prod(self.shape[:-2])
    if count > 8 or self.shape[-1] < 64:
        script.free(script.take(count * POINTER_BYTES), script.take(count * POINTER_BYTES))
