"""Operators whose CUDA kernels take nothing but their outputs, each with the reason why.

Each reason was read in the sources that the comments name, under pytorch's aten/src/ATen/native.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.kernels.operators import declare, returns_first, returns_nothing


def _read_back(func: Any, args: Any, kwargs: Any) -> Any:
    """A value that the host reads from a tensor. Shape-only tensors have none, so each dtype has its answer.

    bool: True. transformers asks whether no document boundary was found in position_ids: there is none.
    float: 0.0. GradScaler sums its found_inf: no gradient overflowed.
    int: 1. Liger counts the labels that are not ignored, to divide by.
    """
    if args[0].device.type != "meta":
        return func(*args)
    dtype = args[0].dtype
    if dtype == torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 1


def _back_to_host(func: Any, args: Any, kwargs: Any) -> Any:
    """A copy to the host gives what the host had sent: DDP's order of gradients, by way of rank 0."""
    return args[0] if args[1].is_meta and not args[0].is_meta else NotImplemented


def _log_sigmoid(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """cuda/ActivationLogSigmoidKernel.cu: the buffer that backward reads on a CPU is empty."""
    return torch.empty_like(args[0]), args[0].new_empty(0)


def _laid_out_by_one_kernel(other: int) -> Callable[[Any, Any, Any], Tensor]:
    """An activation's gradient: one kernel makes it of the gradient and the argument at position `other`, and
    its layout follows the first of both. On meta several operators make it, with the other first."""

    def result(func: Any, args: Any, kwargs: Any) -> Tensor:
        return torch.ops.aten.sigmoid_backward(args[0], args[other])

    return result


def _initialized(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A tensor filled with initial values, without filling it where no value is ever read: on meta, and in
    the adapters that peft makes in host memory and then moves.
    """
    tensor = args[0]
    if tensor.device.type == "meta" or isinstance(tensor, torch.nn.Parameter):
        return tensor
    return func(*args, **kwargs)


# TensorIterator.cpp: cast_common_dtype_to_outputs is for the CPU, CUDA kernels convert as they load
ELEMENTWISE = "elementwise: one kernel, which converts dtypes itself"
declare(
    """
    __or__ abs add add_ addcdiv_ bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_ clamp_min cos
    div div_ elu eq erf erfinv exp exp_ expm1 flip floor floor_divide ge gelu gelu_backward gt hardswish
    hardswish_ hardtanh le leaky_relu leaky_relu_ lerp lerp_ log log_ log1p log_sigmoid_backward logical_and
    logical_and_ lt masked_fill masked_fill_ maximum minimum mul mul_ native_dropout_backward ne neg neg_
    polar pow_ reciprocal relu relu_ remainder roll rsqrt rsqrt_ rsub sgn sgn_ sigmoid sigmoid_backward sign
    silu silu_backward sin softplus sqrt sqrt_ sub sub_ tanh tanh_backward threshold_backward
    """,
    nothing=ELEMENTWISE,
)
declare("hardtanh_backward softplus_backward", nothing=ELEMENTWISE, result=_laid_out_by_one_kernel(1))
declare("elu_backward", nothing=ELEMENTWISE, result=_laid_out_by_one_kernel(5))
declare("log_sigmoid_forward", nothing=ELEMENTWISE, result=_log_sigmoid)
declare("addcmul_", nothing=ELEMENTWISE, unread=2)  # the gradient squared: both factors are the same tensor
# cuda/Foreach*.cu, cuda/AmpKernels.cu, cuda/fused_adam_*.cu: cuda/MultiTensorApply.cuh has the addresses
# in the kernel's arguments. Lists that are too mixed for that run the elementwise operator on each.
LISTS = "lists of tensors: their addresses are arguments of the kernel"
declare(
    """
    _foreach_add _foreach_add_ _foreach_addcdiv_ _foreach_clamp_min_ _foreach_div _foreach_div_ _foreach_lerp_
    _foreach_mul _foreach_mul_ _foreach_rsqrt_ _foreach_sqrt _foreach_sqrt_ _foreach_sub_
    """,
    nothing=LISTS,
)
declare("_foreach_copy_", nothing=LISTS, unread=0)
declare("_foreach_addcmul_", nothing=LISTS, unread=2)  # as addcmul_
declare(
    "_amp_foreach_non_finite_check_and_unscale_ _fused_adamw_ _fused_sgd_",
    nothing=LISTS,
    result=returns_nothing,
)
declare("_amp_update_scale_", nothing=LISTS, result=returns_first)
# TensorFactories.cpp, cuda/RangeFactories.cu, cuda/Distribution*.cu: a generator's state is the host's
FILLED = "made or filled by one kernel, or by none"
declare("arange eye full linspace ones randn randn_like scalar_tensor zeros", nothing=FILLED)
declare("empty empty_like empty_strided new_empty new_empty_strided", nothing=FILLED, launches=False)
# the argument is given for its shape alone
declare("new_full new_ones new_zeros full_like ones_like zeros_like", nothing=FILLED, unread=0)
declare("bernoulli_ fill_ random_", nothing=FILLED, unread=0)
declare("normal_ uniform_ zero_", nothing=FILLED, unread=0, result=_initialized)
# cuda/Copy.cu, copy_requires_temporaries: only between devices, and then only if dtypes differ or one
# side is not contiguous. What is offloaded here is neither. PadNd.cpp fills and copies into a slice;
# cuda/Shape.cu (cat, and stack through it) has its inputs' addresses in the kernel's arguments.
COPIES = "copies straight from the input into the output"
declare(
    "_to_copy cat clone constant_pad_nd pad diag_embed diagonal_backward repeat select_backward "
    "slice_backward stack",
    nothing=COPIES,
)
declare("copy_", nothing=COPIES, unread=0, result=_back_to_host)
# The value goes to pinned host memory (cuda/CUDAScalar.cu).
declare("_local_scalar_dense", nothing="reads a value back", result=_read_back)
# cuda/Indexing.cu, index_select: of contiguous indices. cuda/NLLLoss.cu: of contiguous log-probabilities.
# cuda/ScatterGatherKernel.cu, cuda/TriangularOps.cu, cuda/AveragePool2d.cu, cuda/DilatedMaxPool2d.cu,
# cuda/UpSampleNearest2d.cu, cuda/UpSampleBilinear2d.cu.
CONTIGUOUS = "one kernel over contiguous tensors"
declare("scatter tril tril_ triu avg_pool2d avg_pool2d_backward", nothing=CONTIGUOUS)
declare("max_pool2d_with_indices max_pool2d_with_indices_backward", nothing=CONTIGUOUS)
declare("upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d", nothing=CONTIGUOUS)
declare("gather index_select nll_loss_forward", nothing=CONTIGUOUS, looks_up=True)
declare("nll_loss_backward", nothing=CONTIGUOUS, unread=1)
# cuda/Indexing.cu, index_add_cuda_impl: by atomic additions, unless deterministic ones are asked for.
declare("index_add_ scatter_ scatter_add_", nothing=CONTIGUOUS, scatters=True)
# cuda/SummaryOps.cu: fewer than 100 bins are counted in shared memory. A router has a bin an expert.
declare("histc", nothing="a histogram of fewer than 100 bins")
# cuda/TensorTopK.cu, should_use_multiblock: from 20,000 elements a row on. cuda/TensorTopK.cpp sorts up
# to 4096 in place. A router has a row of experts.
declare("topk", nothing="the largest of a short row")
declare("_unsafe_view", nothing="no kernel", launches=False)
declare(
    "set_ profiler::_record_function_enter_new profiler::_record_function_exit",
    nothing="no kernel",
    launches=False,
)
# transformers/integrations/moe.py: mm(out=) for each expert
declare(
    "transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward",
    nothing="products into a part of the output",
)

# Of these only the bytes that they move are known. What they allocate inside has not been looked at.
declare("lift_fresh", launches=False)
declare("_foreach_zero_ rand_like", unread=0)
declare("index_copy_", scatters=True)
