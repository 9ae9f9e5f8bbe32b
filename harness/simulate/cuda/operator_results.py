"""Operators whose results a shape-only tensor cannot give as CUDA does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.simulate.kernels.attention_choice import torch_release


def _read_back(func: Any, args: Any, kwargs: Any) -> Any:
    """A value read by the host. Shapes have none, so each place that reads one has a defined answer.

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


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Liger asks whether the incoming gradient is 1, to skip a product in place: no memory either way."""
    return True


def _nothing(func: Any, args: Any, kwargs: Any) -> None:
    """The operator works in place on tensors that are there already."""


def _first_argument(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator works in place on its first argument."""
    return args[0]


def _given_out(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The result goes into a tensor that is there already. Before torch 2.13 there is no shape function."""
    return kwargs["out"]


def _efficient_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Seed and offset of the dropout are host tensors; since torch 2.14 only where there is dropout.

    transformers/cuda/attention.cu, _efficient_attention_forward. torch's shape function makes them here.
    """
    out, log_sum_exp, *seeds = func(*args, **kwargs)
    dropout_p = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
    if torch_release(torch.__version__) < (2, 14) or dropout_p > 0:
        seeds = [torch.empty((), dtype=torch.int64) for _ in seeds]
    return out, log_sum_exp, *seeds


def _int8_quantized(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise int8, fp32 scales, and the columns with outliers: they depend on the values, say none."""
    rows = args[0]
    quantized = torch.empty_like(rows, dtype=torch.int8)
    scales = torch.empty(rows.shape[:-1].numel(), dtype=torch.float32, device=rows.device)
    return quantized, scales, torch.empty(0, dtype=torch.int64, device=rows.device)


def _int8_product(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """A (rows, in) quantized, times B (out, in) int8, in A's dtype; and A's columns with outliers: none.

    bitsandbytes' own shape function asks for a size that depends on the values, which meta has not.
    """
    given, quantized, weight = args[:3]
    out = torch.empty((*quantized.shape[:-1], weight.shape[0]), dtype=given.dtype, device=given.device)
    return out, torch.empty(0, dtype=given.dtype, device=given.device)


def _grouped_product(func: Any, args: Any, kwargs: Any) -> Tensor:
    """torch's shape function allows bf16 only; CUDA loops over the groups in fp16 and fp32 (GroupMM.cu)."""
    dtype = args[0].dtype
    in_bf16 = [
        torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device="meta") for t in args[:2]
    ]
    return torch.empty_like(func(*in_bf16, *args[2:], **kwargs), dtype=dtype)


def _initialized(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Initial values. peft makes adapters in host memory and moves them: nobody reads those either."""
    tensor = args[0]
    if tensor.device.type == "meta" or isinstance(tensor, torch.nn.Parameter):
        return tensor
    return func(*args, **kwargs)


OPERATORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten.uniform_.default": _initialized,
    "aten.normal_.default": _initialized,
    "aten.zero_.default": _initialized,
    "aten._grouped_mm.default": _grouped_product,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_attention,
    "aten.addmm.dtype_out": _given_out,
    "aten._local_scalar_dense.default": _read_back,
    "aten.equal.default": _equal,
    "aten._amp_foreach_non_finite_check_and_unscale_.default": _nothing,
    "aten._amp_update_scale_.default": _first_argument,
    "aten._fused_adamw_.default": _nothing,
    "aten._fused_sgd_.default": _nothing,
    "bitsandbytes.int8_vectorwise_quant.default": _int8_quantized,
    "bitsandbytes.int8_mixed_scaled_mm.default": _int8_product,
}
"""Operators without a shape-only implementation, or with values that cost time, and what they return."""
