"""F.scaled_dot_product_attention as CUDA runs it, on shape-only tensors.

torch calls one of four kernels by device, dtype and shapes (cuda_attention.py says which). Each is an
operator with shape functions and a derivative of its own, so calling it gives the outputs and the saved
tensors that it has on a GPU. What torch does around the call: ATen/native/transformers/attention.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.cuda_attention import Backend

aten = torch.ops.aten
scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention
"""torch's own, whatever stands in its place while a simulation runs."""


def attention_on_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: Backend,
) -> Tensor:
    """The output, (batch, heads, length, head_dim), computed by `backend`; shapes as for SDPA."""
    if backend == "math":  # what torch chooses for shape-only tensors anyway
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    bias = _additive(mask, query.dtype)
    if backend == "cudnn":
        out: Any = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, _needs_gradient(query, key, value), dropout_p, is_causal, scale=scale
        )
        return out[0]
    if backend == "efficient":
        if bias is not None:
            bias = _aligned(bias).expand(*query.shape[:-1], key.shape[-2])
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, _needs_gradient(query, key, value), dropout_p, is_causal, scale=scale
        )
        return out[0]
    # pad_last_dim<8>: the flash kernels take head sizes that are a multiple of 8
    padded = [t if width % 8 == 0 else pad(t, (0, 8 - width % 8)) for t in (query, key, value)]
    out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
    return out if width % 8 == 0 else out[..., :width]


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """convert_boolean_attn_mask: True may attend and becomes 0, False becomes -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _aligned(bias: Tensor) -> Tensor:
    """pad_bias: the memory-efficient kernel wants rows of a multiple of 16 elements, and reads the first."""
    length = bias.shape[-1]
    return bias if length % 16 == 0 else pad(bias, (0, 16 - length % 16))[..., :length]
