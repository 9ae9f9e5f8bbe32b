"""F.scaled_dot_product_attention as CUDA runs it, on shape-only tensors.

torch chooses one of four kernels by device, dtype and shapes (kernels/attention_choice.py says which). Each
is an operator with shape functions and a derivative of its own, so that calling it gives the outputs and
saved tensors that it has on a GPU. This file has what torch does around the call; what the kernels allocate
inside is in kernels/attention.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.kernels import HALF_DTYPES, Backend

aten = torch.ops.aten
ALIGNMENT = 8
CUDNN_MASKED = -65504.0


def attention_on_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: Backend,
) -> Tensor:
    """F.scaled_dot_product_attention on CUDA with `backend` chosen (native/transformers/attention.cpp).

    Tensors are (batch, heads, length, head_dim). Where torch's shape functions differ from CUDA: the seeds
    of "efficient" are host tensors there, and "cudnn" makes no log-sum-exp when no gradient is needed.
    """
    inputs = (query, key, value)
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if backend == "flash":
        head_dim = query.shape[-1]
        filled = [padded(t) for t in inputs]
        scale = scale or 1 / math.sqrt(head_dim)
        out = _first(
            aten._scaled_dot_product_flash_attention(*filled, dropout_p, is_causal, False, scale=scale)
        )
        return out if out.shape[-1] == head_dim else out[..., :head_dim]
    if backend == "cudnn":
        mask = _additive(attn_mask, query.dtype, CUDNN_MASKED)
        return _first(
            aten._scaled_dot_product_cudnn_attention(
                *inputs, mask, needs_gradient, dropout_p, is_causal, False, scale=scale
            )
        )
    mask = _additive(attn_mask, query.dtype, -math.inf)
    if backend == "efficient":
        mask = None if mask is None else _aligned_mask(mask, query, key)
        return _first(
            aten._scaled_dot_product_efficient_attention(
                *inputs, mask, needs_gradient, dropout_p, is_causal, scale=scale
            )
        )
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _first(outputs: Sequence[Any]) -> Tensor:
    """The first output. Unsaved others are freed in order, as in C++, where a tuple frees its last first."""
    first, *others = outputs
    del outputs
    for n in range(len(others)):
        others[n] = None
    return first


def padded(tensor: Tensor) -> Tensor:
    """The head dim filled up to a multiple of 8 (pad_last_dim<8>)."""
    missing = -tensor.shape[-1] % ALIGNMENT
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: Tensor | None, dtype: torch.dtype, masked: float) -> Tensor | None:
    # convert_boolean_attn_mask: where the mask is false, -inf is added (cuDNN: the lowest fp16)
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.scalar_tensor(masked, dtype=dtype, device=mask.device)
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, zero, lowest)


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    # preprocess_mask: a copy whose strides are multiples of 8, seen by every head and batch
    length, strides = mask.shape[-1], mask.stride()
    if strides[-1] != 1 or any(stride % ALIGNMENT for stride in strides[:-1]):
        mask = torch.nn.functional.pad(mask, (0, ALIGNMENT - length % ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    # _scaled_dot_product_attention_math, which computes in fp32. Spelled out because torch's own, when it
    # sees a dispatch mode, adds the mask out of place, where a run without one adds it in place.
    dtype = query.dtype
    given = [t.float() if dtype in HALF_DTYPES else t for t in (query, key, value)]
    del query, key, value
    factor = math.sqrt(scale or 1 / math.sqrt(given[0].shape[-1]))
    query = given[0] * factor
    if is_causal:
        causal = torch.ones(query.shape[-2], given[1].shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(causal, query.dtype, -math.inf)
        del causal
    key, value = given[1:]
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    second_output = weights.to(dtype)  # made before the first, and dropped
    out = (weights @ value).to(dtype)
    del weights, key, value, query, mask  # in the order in which C++ destroys them
    while given:
        given.pop()
    del second_output
    return out
