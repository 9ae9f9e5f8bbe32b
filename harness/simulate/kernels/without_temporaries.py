"""Operators whose CUDA kernels take nothing but their outputs, each with the reason why.

Somebody has looked at their sources, under pytorch's aten/src/ATen/native unless told. An operator that is
neither here nor in RULES may take memory that nobody knows of: a profile names it.
"""

from __future__ import annotations

_REASONS = {
    # TensorIterator.cpp: cast_common_dtype_to_outputs is for the CPU, CUDA kernels convert as they load
    "elementwise: one kernel, which converts dtypes itself": """
        abs add add_ addcdiv_ addcmul_ bitwise_and bitwise_not clamp clamp_ cos div div_ eq floor_divide ge
        gelu gelu_backward gt le lerp_ logical_and_ lt masked_fill masked_fill_ mul mul_
        native_dropout_backward ne neg pow_ reciprocal rsqrt rsqrt_ rsub sigmoid sigmoid_backward silu
        silu_backward sin sqrt sub sub_ tanh tanh_backward
    """,
    # cuda/Foreach*.cu, cuda/AmpKernels.cu, cuda/fused_adam_*.cu: cuda/MultiTensorApply.cuh has the addresses
    # in the kernel's arguments. Lists that are too mixed for that run the elementwise operator on each.
    "lists of tensors: their addresses are arguments of the kernel": """
        _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _foreach_add_ _foreach_addcdiv_
        _foreach_addcmul_ _foreach_clamp_min_ _foreach_div_ _foreach_lerp_ _foreach_mul _foreach_mul_
        _foreach_rsqrt_ _foreach_sqrt _fused_adamw_ _fused_sgd_
    """,
    # TensorFactories.cpp, cuda/RangeFactories.cu, cuda/Distribution*.cu: a generator's state is the host's
    "made or filled by one kernel, or by none": """
        arange empty empty_like empty_strided fill_ full full_like linspace new_empty new_ones new_zeros
        normal_ ones ones_like randn scalar_tensor uniform_ zero_ zeros zeros_like
    """,
    # cuda/Copy.cu, copy_requires_temporaries: only between devices, and then only if dtypes differ or one
    # side is not contiguous. What is offloaded here is neither. PadNd.cpp fills and copies into a slice;
    # cuda/Shape.cu (cat, and stack through it) has its inputs' addresses in the kernel's arguments.
    "copies straight from the input into the output": """
        _to_copy cat clone constant_pad_nd copy_ slice_backward stack
    """,
    # The value goes to pinned host memory (cuda/CUDAScalar.cu).
    "reads a value back": "_local_scalar_dense",
    # cuda/Indexing.cu, index_select: of contiguous indices. cuda/NLLLoss.cu: of contiguous log-probabilities.
    # cuda/ScatterGatherKernel.cu, cuda/TriangularOps.cu.
    "one kernel over contiguous tensors": """
        embedding nll_loss_backward nll_loss_forward scatter scatter_ tril tril_
    """,
    # cuda/SummaryOps.cu: fewer than 100 bins are counted in shared memory. A router has a bin an expert.
    "a histogram of fewer than 100 bins": "histc",
    # cuda/TensorTopK.cu, should_use_multiblock: from 20,000 elements a row on. cuda/TensorTopK.cpp sorts up
    # to 4096 in place. A router has a row of experts.
    "the largest of a short row": "topk",
    "no kernel": "_unsafe_view set_",
}
_OTHERS = {
    # bitsandbytes/backends/cuda/ops.py
    "one kernel over contiguous tensors": """
        bitsandbytes::dequantize_4bit bitsandbytes::dequantize_blockwise
        bitsandbytes::optimizer_update_32bit bitsandbytes::optimizer_update_8bit_blockwise
    """,
    # transformers/integrations/moe.py: mm(out=) for each expert
    "products into a part of the output": """
        transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward
    """,
    "no kernel": "profiler::_record_function_enter_new profiler::_record_function_exit",
}

LOOKED_AT = frozenset(
    [f"aten::{name}" for names in _REASONS.values() for name in names.split()]
    + [name for names in _OTHERS.values() for name in names.split()]
)
