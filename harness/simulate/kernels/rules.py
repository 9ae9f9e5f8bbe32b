"""The rule of each operator that takes memory inside on CUDA: from its arguments to a script of steps.

Each names its source under pytorch's aten/src/ATen/native. simulate/kernels/temporaries.py applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.simulate.kernels import attention, flash_attention, matmul, sorting
from harness.simulate.kernels.reductions import Kernel, reduce
from harness.simulate.kernels.script import Gpu, Script, ceil_div, product, size_of

LOWP = (torch.float16, torch.bfloat16)
FOREACH_CHUNK = 65536  # kChunkSize in cuda/MultiTensorApply.cuh
Arguments = dict[str, Any]
Outputs = Sequence[Any]


# ---- reductions --------------------------------------------------------------------------------------


def _sum(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # native/ReduceOps.cpp and ReduceOpsUtils.h, make_reduction_from_out_ty: the input is converted to the
    # output's dtype first, except 16-bit inputs summed in fp32
    input, dtype = a["self"], out[0].dtype
    script.output(0)
    converted = None
    if input.dtype != dtype and not (input.dtype in LOWP and dtype == torch.float32):
        converted = script.take(size_of(input, dtype))
        input = torch.empty_like(input, dtype=dtype)
    reduce(script, input, a.get("dim") or (), dtype, Kernel(max(4, dtype.itemsize)), gpu)
    script.free(converted)


def _norm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/ReduceNormKernel.cu
    script.output(0)
    reduce(script, a["self"], a["dim"] or (), out[0].dtype, Kernel(max(4, out[0].dtype.itemsize)), gpu)


def _all_any(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/ReduceLogicKernel.cu
    script.output(0)
    dims = [a["dim"]] if isinstance(a.get("dim"), int) else a.get("dim") or ()
    reduce(script, a["self"], dims, torch.bool, Kernel(1), gpu)


def _extreme(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/ReduceMaxValuesKernel.cu, over everything or with amax's dims
    if len(out) > 1:  # with indices: cuda/TensorCompare.cu works row by row
        script.output(0, 1)
        return
    input = a["self"]
    script.output(0)
    copy = None
    if "dim" not in a and not input.is_contiguous():
        copy = script.take(size_of(input))
        input = torch.empty_like(input, memory_format=torch.contiguous_format)
    reduce(script, input, a.get("dim") or (), input.dtype, Kernel(input.dtype.itemsize), gpu)
    script.free(copy)


def _foreach_norm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/ForeachReduceOp.cu: one partial result per tensor and chunk. Before 2.15 each tensor has as many as
    # the largest; since then its own, and a list says where they start.
    chunks = [ceil_div(t.numel(), FOREACH_CHUNK) for t in a["self"]]
    ragged = gpu.torch_version >= (2, 15)
    starts = script.take(8 * (len(chunks) + 1)) if ragged else None
    partial = script.take(
        (sum(chunks) if ragged else len(chunks) * max(chunks)) * max(4, out[0].dtype.itemsize)
    )
    script.output(*range(len(out)))
    script.free(partial, starts)


def _safe_softmax(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.safe_softmax(script, a["self"], a["dim"], gpu)


def _pow_of_scalar(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # native/Pow.cpp: a number to the power of a tensor becomes a tensor of one double first
    script.output(0)
    if not isinstance(a["self"], Tensor):
        script.briefly(8)


# ---- softmax and normalization -----------------------------------------------------------------------


def _softmax(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/SoftMax.cu, host_softmax
    script.output(0)
    script.briefly(0 if a["self"].is_contiguous() else size_of(a["self"]))


def _softmax_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output is a tensor of its own
    script.output(0)
    product_of_both = script.take(size_of(a["grad_output"]))
    copy = script.take(0 if a["output"].is_contiguous() else size_of(a["output"]))
    script.free(copy, product_of_both)


def _log_softmax_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    script.output(0)
    copies = [script.take(size_of(t)) for t in (a["grad_output"], a["output"]) if not t.is_contiguous()]
    script.free(*reversed(copies))


def _layer_norm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/layer_norm_kernel.cu
    copy = None if a["input"].is_contiguous() else script.take(size_of(a["input"]))
    script.output(*_present(out))
    script.free(copy)


def _norm_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: a very tall input has its rows split into
    # pieces of 32, whose partial gradients of weight and bias are summed by aten::sum
    grad, input = a["grad_out"], a["input"]
    copies = [script.take(size_of(t)) for t in (grad, input) if not t.is_contiguous()]
    script.output(0)
    columns = product(a["normalized_shape"])
    rows = input.numel() // max(columns, 1)
    weights = [i for i in _present(out) if i > 0]
    if rows <= 64 * 1024 or columns // 32 >= gpu.sm_count // 2:
        script.output(*weights)
    elif weights:
        dropped = [script.take(size_of(out[i])) for i in weights]
        partial = out[weights[0]].new_empty((rows // 32, columns))
        partials = [script.take(size_of(partial)) for _ in weights]
        for index, handle in zip(weights, dropped, strict=True):
            script.output(index)
            reduce(script, partial, (0,), partial.dtype, Kernel(4), gpu)
            script.free(handle)
        script.free(*partials)
    script.free(*reversed(copies))


def _dropout(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/Dropout.cu: the mask comes first
    script.output(1, 0)


# ---- indexing and sorting ----------------------------------------------------------------------------


def _index(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # native/TensorAdvancedIndexing.cpp, AdvancedIndex: several indices must have the same strides
    indices = [i for i in a["indices"] if i is not None]
    copies: list[int | None] = []
    if len(indices) > 1:
        shape = torch.broadcast_shapes(*(i.shape for i in indices))
        strides = {i.expand(shape).stride() for i in indices}
        if len(strides) > 1:
            copies = [
                script.take(product(shape) * i.dtype.itemsize)
                for i in indices
                if not i.expand(shape).is_contiguous()
            ]
    script.output(0)
    script.free(*copies)


def _index_put(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    _accumulate(script, a, gpu, in_place=False, checked=True)


def _index_put_(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    _accumulate(script, a, gpu, in_place=True, checked=True)


def _index_put_impl_(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    _accumulate(script, a, gpu, in_place=True, checked=not a["unsafe"])


def _accumulate(script: Script, a: Arguments, gpu: Gpu, *, in_place: bool, checked: bool) -> None:
    indices = [i for i in a["indices"] if i is not None]
    if a["accumulate"] and len(indices) == 1 and indices[0].dtype != torch.bool:
        sorting.index_put_accumulate(script, a["self"], indices[0], gpu, in_place=in_place, checked=checked)
    elif not in_place:
        script.output(0)


def _where(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # native/TensorCompare.cpp, where_self_out: both sides get the result's dtype first
    sides = [a[name] for name in ("self", "other") if isinstance(a.get(name), Tensor)]
    converted = [script.take(size_of(t, out[0].dtype)) for t in sides if t.dtype != out[0].dtype]
    script.output(0)
    script.free(*reversed(converted))


def _equal(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # cuda/Equal.cpp: eq(self, other).all().item()
    input = a["self"]
    same, all_same = script.take(input.numel()), script.take(1)
    reduce(script, input.new_empty(input.shape, dtype=torch.bool), (), torch.bool, Kernel(1), gpu)
    script.free(all_same, same)


def _sort(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    sorting.sort(script, a["self"], a["dim"], gpu)


def _cumsum(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    sorting.cumsum(script, a["self"], a["dim"], out[0].dtype)


def _embedding_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    sorting.embedding_backward(script, a["grad_output"], a["indices"], a["num_weights"], gpu)


# ---- products ----------------------------------------------------------------------------------------


def _mm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    _product(script, (a["self"], a["mat2"]), gpu, lt=False)


def _addmm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    lt = matmul.calls_cublaslt(a["self"], a["mat1"].shape, a["mat2"].shape, a["alpha"], a["beta"])
    _product(script, (a["mat1"], a["mat2"]), gpu, lt=lt)


def _baddbmm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    _product(script, (a["batch1"], a["batch2"]), gpu, lt=False)


def _product(script: Script, operands: Sequence[Tensor], gpu: Gpu, *, lt: bool) -> None:
    matmul.matrix_product(script, operands, matmul.workspace_per_call(gpu, lt=lt))


def _grouped_mm(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    groups = a["offs"].shape[0] if a["offs"] is not None else a["self"].shape[0]
    matmul.grouped_product(script, groups, a["self"].dtype, gpu)


def _gemm_4bit(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    scales = a["absmax_8bit"]
    count = None if scales is None else scales.numel()
    matmul.gemm_4bit(script, a["A"], a["shapeB"], a["blocksize"], count, a["bias"], gpu)


def _int8_product(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    matmul.int8_product(script, a["A"], product(a["CA"].shape[:-1]), a["CB"].shape[0])


def _int8_quantize(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # bitsandbytes/backends/cuda/ops.py: which columns have outliers is found with torch operators
    input = a["A"]
    script.output(1, 0)
    if a["threshold"] > 0:
        magnitude = script.take(size_of(input))
        outliers = script.take(input.numel())
        script.free(magnitude)
        any_outlier = script.take(1)
        reduce(script, input.new_empty(input.shape, dtype=torch.bool), (), torch.bool, Kernel(1), gpu)
        script.free(any_outlier)
        script.briefly(1)  # the 0 written into the columns with outliers, here none
        script.free(outliers)


def _quantize_blocks(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    # bitsandbytes/backends/cuda/ops.py: the scales come first
    copy = None if a["A"].is_contiguous() else script.take(size_of(a["A"]))
    script.output(1, 0)
    script.free(copy)


# ---- attention ---------------------------------------------------------------------------------------


def _flash(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.flash_forward(script, a["query"], a["key"], a["dropout_p"], gpu)


def _flash_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.flash_backward(script, a["grad_out"], a["query"], a["key"], a["out"], gpu)


def _efficient(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.efficient_forward(
        script, a["query"], a["value"], a["dropout_p"], gpu, log_sum_exp=a["compute_log_sumexp"]
    )


def _efficient_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.efficient_backward(
        script, a["grad_out_"], a["query"], a["key"], a["value"], a["dropout_p"], gpu
    )


def _cudnn(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.cudnn_forward(
        script, a["query"], a["key"], a["dropout_p"], gpu, log_sum_exp=a["compute_log_sumexp"]
    )


def _cudnn_backward(script: Script, a: Arguments, out: Outputs, gpu: Gpu) -> None:
    attention.cudnn_backward(script, a["query"], a["key"], a["dropout_p"], gpu)


def _present(out: Outputs) -> list[int]:
    return [i for i, value in enumerate(out) if isinstance(value, Tensor)]


RULES: dict[str, Callable[[Script, Arguments, Outputs, Gpu], None]] = {
    "aten::_cudnn_attention_backward": _cudnn_backward,
    "aten::_foreach_norm": _foreach_norm,
    "aten::_fused_rms_norm": _layer_norm,
    "aten::_fused_rms_norm_backward": _norm_backward,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_index_put_impl_": _index_put_impl_,
    "aten::_log_softmax": _softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::addmm": _addmm,
    "aten::all": _all_any,
    "aten::amax": _extreme,
    "aten::any": _all_any,
    "aten::baddbmm": _baddbmm,
    "aten::bmm": _mm,
    "aten::cumsum": _cumsum,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::equal": _equal,
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put_,
    "aten::linalg_vector_norm": _norm,
    "aten::max": _extreme,
    "aten::min": _extreme,
    "aten::mean": _sum,
    "aten::mm": _mm,
    "aten::native_dropout": _dropout,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _norm_backward,
    "aten::pow": _pow_of_scalar,
    "aten::sort": _sort,
    "aten::sum": _sum,
    "aten::where": _where,
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_product,
    "bitsandbytes::int8_vectorwise_quant": _int8_quantize,
    "bitsandbytes::quantize_4bit": _quantize_blocks,
    "bitsandbytes::quantize_blockwise": _quantize_blocks,
    **flash_attention.SCRIPTS,
}
"""Operators that take memory inside, or allocate their outputs in another order than they return them."""
