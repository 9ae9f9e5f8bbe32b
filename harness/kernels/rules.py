"""Reductions, softmax, normalization, `where` and others: what each allocates inside on CUDA.

Each rule names its source under pytorch's aten/src/ATen/native.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from harness.kernels.gpu import Gpu
from harness.kernels.operators import contiguous_first, kernel
from harness.kernels.reductions import Dims, Kernel, reduce
from harness.kernels.script import Script, present, size_of
from harness.units import ceil_div

LOWP = (torch.float16, torch.bfloat16)
FOREACH_CHUNK = 65536  # kChunkSize in cuda/MultiTensorApply.cuh
Outputs = Sequence[Any]


@kernel("sum mean")
def sums(script: Script, self: Tensor, outputs: Outputs, gpu: Gpu, dim: Dims = None) -> None:
    """native/ReduceOps.cpp and ReduceOpsUtils.h, make_reduction_from_out_ty: the input is converted to the
    output's dtype first, except 16-bit inputs summed in fp32.
    """
    dtype = outputs[0].dtype
    script.output(0)
    converted = None
    if self.dtype != dtype and not (self.dtype in LOWP and dtype == torch.float32):
        converted = script.take(size_of(self, dtype))
        self = torch.empty_like(self, dtype=dtype)
    reduce(script, self, dim, dtype, Kernel(max(4, dtype.itemsize)), gpu)
    script.free(converted)


@kernel("linalg_vector_norm prod")
def norm_or_product(script: Script, self: Tensor, outputs: Outputs, gpu: Gpu, dim: Dims = None) -> None:
    """cuda/ReduceNormKernel.cu, cuda/ReduceSumProdKernel.cu."""
    dtype = outputs[0].dtype
    script.output(0)
    reduce(script, self, dim, dtype, Kernel(max(4, dtype.itemsize)), gpu)


@kernel("all any _is_all_true")
def all_any(script: Script, self: Tensor, gpu: Gpu, dim: Dims = None) -> None:
    """cuda/ReduceLogicKernel.cu."""
    script.output(0)
    reduce(script, self, dim, torch.bool, Kernel(1), gpu)


@kernel("isinf")
def isinf(script: Script, self: Tensor) -> None:
    """native/TensorCompare.cpp: whether the absolute values are equal to infinity."""
    absolute = script.take(size_of(self))
    script.output(0)
    script.free(absolute)


@kernel("amax max min")
def extreme(script: Script, self: Tensor, outputs: Outputs, gpu: Gpu, dim: Any = None) -> None:
    """cuda/ReduceMaxValuesKernel.cu, over everything or over amax's dims. Where indices are returned too,
    cuda/TensorCompare.cu works row by row and stages nothing.
    """
    if len(outputs) > 1:
        script.output(0, 1)
        return
    script.output(0)
    copy = None
    if dim is None and not self.is_contiguous():
        copy = script.take(size_of(self))
        self = torch.empty_like(self, memory_format=torch.contiguous_format)
    reduce(script, self, dim, self.dtype, Kernel(self.dtype.itemsize), gpu)
    script.free(copy)


@kernel("argmax")
def place_of_largest(script: Script, self: Tensor, gpu: Gpu, dim: Dims = None) -> None:
    """cuda/ReduceArgMaxKernel.cu: a value and its position, as int64, are staged."""
    script.output(0)
    reduce(script, self, dim, torch.int64, Kernel(16), gpu)


@kernel("logsumexp")
def logsumexp(script: Script, self: Tensor, dim: Sequence[int], outputs: Outputs, gpu: Gpu) -> None:
    """native/ReduceOps.cpp, logsumexp_out_impl: the largest of each row, infinite ones set to 0; then the sum
    of exp(self - largest).
    """
    dtype, count = outputs[0].dtype, outputs[0].numel()
    largest = script.take(count * dtype.itemsize)
    reduce(script, self, dim, dtype, Kernel(dtype.itemsize), gpu)
    absolute = script.take(count * dtype.itemsize)
    script.briefly(count)
    script.free(absolute)
    shifted = script.take(size_of(self, dtype))
    script.output(0)
    reduce(script, torch.empty_like(self), dim, dtype, Kernel(max(4, dtype.itemsize)), gpu)
    script.free(shifted, largest)


@kernel("_foreach_norm")
def norms(script: Script, self: Sequence[Tensor], outputs: Outputs, gpu: Gpu) -> None:
    """cuda/ForeachReduceOp.cu: one partial result per tensor and chunk. Each tensor has as many as the
    largest; packed, as many as its own, and a list says where they start.
    """
    chunks = [ceil_div(t.numel(), FOREACH_CHUNK) for t in self]
    packed = gpu.torch.packs_norms_of_lists
    starts = script.take(8 * (len(chunks) + 1)) if packed else None
    count = sum(chunks) if packed else len(chunks) * max(chunks)
    partial = script.take(count * max(4, outputs[0].dtype.itemsize))
    script.output(*range(len(outputs)))
    script.free(partial, starts)


def _true(func: Any, args: Any, kwargs: Any) -> bool:
    """Liger asks whether the incoming gradient is 1, to skip a product in place: no memory either way."""
    return True


@kernel("equal", result=_true)
def equal(script: Script, self: Tensor, gpu: Gpu) -> None:
    """cuda/Equal.cpp: eq(self, other).all().item()."""
    same, all_same = script.take(self.numel()), script.take(1)
    reduce(script, self.new_empty(self.shape, dtype=torch.bool), (), torch.bool, Kernel(1), gpu)
    script.free(all_same, same)


@kernel("pow")
def power(script: Script, self: Any) -> None:
    """native/Pow.cpp: a number to the power of a tensor becomes a tensor of one double first."""
    script.output(0)
    script.briefly(0 if isinstance(self, Tensor) else 8)


@kernel("_softmax _log_softmax")
def softmax(script: Script, self: Tensor) -> None:
    """cuda/SoftMax.cu, host_softmax."""
    script.output(0)
    script.briefly(0 if self.is_contiguous() else size_of(self))


@kernel("_softmax_backward_data")
def softmax_backward(script: Script, grad_output: Tensor, output: Tensor) -> None:
    """cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output is a tensor of its own; contiguous copies of
    this one and of the output."""
    script.output(0)
    both = grad_output * output
    product_of_both = script.take(size_of(grad_output))
    copies = [script.take(size_of(t)) for t in (both, output) if not t.is_contiguous()]
    script.free(*reversed(copies), product_of_both)


@kernel("_log_softmax_backward_data", result=contiguous_first)
def log_softmax_backward(script: Script, grad_output: Tensor, output: Tensor) -> None:
    """cuda/SoftMax.cu, host_softmax_backward: contiguous copies."""
    script.output(0)
    copies = [script.take(size_of(t)) for t in (grad_output, output) if not t.is_contiguous()]
    script.free(*reversed(copies))


@kernel("native_layer_norm _fused_rms_norm")
def layer_norm(script: Script, input: Tensor, outputs: Outputs) -> None:
    """cuda/layer_norm_kernel.cu."""
    copy = None if input.is_contiguous() else script.take(size_of(input))
    script.output(*present(outputs))
    script.free(copy)


@kernel("native_layer_norm_backward _fused_rms_norm_backward", result=contiguous_first)
def layer_norm_backward(
    script: Script,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    outputs: Outputs,
    gpu: Gpu,
) -> None:
    """cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: a very tall input has its rows split into
    pieces of 32, whose partial gradients of weight and bias are summed by aten::sum.
    """
    inputs = None if input.is_contiguous() else script.take(size_of(input))
    script.output(0)
    columns = prod(normalized_shape)
    rows = input.numel() // max(columns, 1)
    weights = [i for i in present(outputs) if i > 0]
    is_tall = rows > 64 * 1024 and columns // 32 < gpu.sm_count // 2
    dropped = [script.take(size_of(outputs[i])) for i in weights if is_tall]
    script.output(*(i for i in weights if not is_tall))
    gradients = None if grad_out.is_contiguous() else script.take(size_of(grad_out))
    if dropped:
        partial = outputs[weights[0]].new_empty((rows // 32, columns))
        partials = [script.take(size_of(partial)) for _ in weights]
        for index, handle in zip(weights, dropped, strict=True):
            script.output(index)
            reduce(script, partial, (0,), partial.dtype, Kernel(4), gpu)
            script.free(handle)
        script.free(*partials)
    script.free(gradients, inputs)


@kernel("native_dropout")
def dropout(script: Script) -> None:
    """cuda/Dropout.cu: the mask comes first."""
    script.output(1, 0)


@kernel("where")
def where(script: Script, self: Any, other: Any, outputs: Outputs) -> None:
    """native/TensorCompare.cpp, where_self_out: both sides get the result's dtype first."""
    dtype = outputs[0].dtype
    sides = [side for side in (self, other) if isinstance(side, Tensor)]
    converted = [script.take(size_of(side, dtype)) for side in sides if side.dtype != dtype]
    script.output(0)
    script.free(*reversed(converted))


@kernel("embedding", looks_up=True)
def embedding(script: Script, indices: Tensor) -> None:
    """native/Embedding.cpp: all indices in one row, which broadcast ones are copied for."""
    copy = None if _is_one_row(indices) else script.take(size_of(indices))
    script.output(0)
    script.free(copy)


def _is_one_row(tensor: Tensor) -> bool:
    """Whether a view of the tensor has one dimension."""
    try:
        tensor.view(-1)
    except RuntimeError:
        return False
    return True


@kernel("unfold_backward")
def unfold_backward(script: Script, outputs: Outputs, dim: int, size: int, step: int) -> None:
    """native/UnfoldBackward.cpp and UnfoldBackward.h: where windows overlap, the positions 0, 1, 2 ... of the
    dimension."""
    script.output(0)
    if step < size:
        script.briefly(outputs[0].shape[dim] * torch.int64.itemsize)
