"""Attention on shape-only tensors with the allocations, outputs and saved tensors it has on CUDA.

`attention_on_meta` is torch's own scaled_dot_product_attention around the kernel that CUDA would choose;
`flash_attention_2` and `flash_attention_3` are the functions of the flash-attn packages. What torch's
kernels take inside is not here but in cuda_attention_memory.py; those of flash-attn are no operators of
torch, so their temporaries are tensors that live as long as they do on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.cuda_attention import HALF_DTYPES, Backend
from harness.cuda_attention_memory import flash_head_dim, flash_splits
from harness.cuda_script import Gpu, ceil_div, round_up

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
        padded = [_padded(t) for t in inputs]
        scale = scale or 1 / math.sqrt(head_dim)
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out if out.shape[-1] == head_dim else out[..., :head_dim]
    if backend == "cudnn":
        mask = _additive(attn_mask, query.dtype, CUDNN_MASKED)
        return aten._scaled_dot_product_cudnn_attention(
            *inputs, mask, needs_gradient, dropout_p, is_causal, False, scale=scale
        )[0]
    mask = _additive(attn_mask, query.dtype, -math.inf)
    if backend == "efficient":
        mask = None if mask is None else _aligned_mask(mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            *inputs, mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _padded(tensor: Tensor) -> Tensor:
    # pad_last_dim<8>
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
    if dtype in HALF_DTYPES:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(scale or 1 / math.sqrt(query.shape[-1]))
    query = query * factor
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(causal, query.dtype, -math.inf)
        del causal
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
    del second_output
    return out


class FlashAttention(NamedTuple):
    """The functions of a flash-attn package that transformers calls."""

    func: Callable[..., Tensor]
    """flash_attn_func(q, k, v, ...): (batch, length, heads, head_dim)."""
    varlen_func: Callable[..., Tensor]
    """flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, ...): (tokens, heads, head_dim)."""


def flash_attention_2(gpu: Gpu) -> FlashAttention:
    """flash_attn_func and flash_attn_varlen_func of flash-attn 2.8, on shape-only tensors."""
    return _package(_FlashAttention2, gpu)


def flash_attention_3(gpu: Gpu) -> FlashAttention:
    """flash_attn_func and flash_attn_varlen_func of flash-attn 3 (hopper/), on shape-only tensors."""
    return _package(_FlashAttention3, gpu)


def _package(function: Any, gpu: Gpu) -> FlashAttention:
    def dense(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False, **_: Any
    ) -> Tensor:
        return function.apply(q, k, v, None, None, dropout_p, causal, gpu)

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        causal: bool = False,
        **_: Any,
    ) -> Tensor:
        return function.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, causal, gpu)

    return FlashAttention(dense, varlen)


def _float(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


class _FlashAttention2(torch.autograd.Function):
    """flash_attn_interface.py (FlashAttnFunc, FlashAttnVarlenFunc); csrc/flash_attn/flash_api.cpp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        dropout_p: float,
        causal: bool,
        gpu: Gpu,
    ) -> Tensor:
        ctx.head_dim = q.shape[-1]
        q, k, v = (_padded(t.detach()) for t in (q, k, v))
        out = torch.empty_like(q)
        splits = 1
        if starts_q is None:
            batch, length, heads, head_dim = q.shape
            sums = _float(q, batch, heads, length)
            if dropout_p == 0:
                splits = flash_splits(batch * heads * ceil_div(length, 64), k.shape[1], head_dim, gpu)
        else:
            sums = _float(q, q.shape[1], q.shape[0])
        partial = [
            _float(q, splits, *sums.shape, *more)
            for more in ((), (flash_head_dim(q.shape[-1]),))
            if splits > 1
        ]
        random_state = q.new_empty(2, dtype=torch.int64)
        del partial
        ctx.save_for_backward(q, k, v, out, sums, starts_q, starts_k, random_state)
        return out[..., : ctx.head_dim]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, starts_q, *_ = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        padded_grad = _padded(grads[0])
        heads, width = q.shape[-2], flash_head_dim(q.shape[-1])
        if starts_q is not None:  # 128 rows of slack for each sequence
            lead: tuple[int, ...] = ()
            rows = q.shape[0] + 128 * (starts_q.shape[0] - 1)
        else:
            lead, rows = (q.shape[0],), round_up(q.shape[1], 128)
        row_sums, dq_sums = _float(q, *lead, heads, rows), _float(q, *lead, rows, heads, width)
        full = (*k.shape[:-2], heads, k.shape[-1])
        grouped = [q.new_empty(full) for _ in range(2)] if k.shape[-2] != heads else []
        del grouped, dq_sums, row_sums, padded_grad
        return *(d[..., : ctx.head_dim] for d in (dq, dk, dv)), None, None, None, None, None


class _FlashAttention3(torch.autograd.Function):
    """hopper/flash_attn_interface.py; hopper/flash_api.cpp (mha_fwd, mha_bwd) on compute capability 9.0."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        dropout_p: float,
        causal: bool,
        gpu: Gpu,
    ) -> Tensor:
        q, k, v = q.detach(), k.detach(), v.detach()
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        if starts_q is None:
            batch, sums = q.shape[0], _float(q, q.shape[0], q.shape[2], q.shape[1])
        else:
            batch, sums = starts_q.shape[0] - 1, _float(q, q.shape[1], q.shape[0])
        if causal or starts_q is not None:  # counters of the tile scheduler (scheduler_needs_semaphore)
            vectors = 1 + causal + 2 * (starts_q is not None)
            scheduler = q.new_empty(round_up(batch, 4) * vectors + 1, dtype=torch.int32)
            del scheduler
        ctx.save_for_backward(q, k, v, out, sums, starts_q, starts_k)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, starts_q, _ = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        heads, key_heads = q.shape[-2], k.shape[-2]
        width = next(size for size in (64, 96, 128, 192, 256) if size >= q.shape[-1])  # round_up_headdim
        query_block = 128 if width == 64 else 80 if width == 128 and not ctx.causal else 64
        key_block = 128 if width <= 128 else 96 if width == 192 else 80
        if starts_q is not None:  # a block of slack for each sequence
            batch, lead = starts_q.shape[0] - 1, ()
            rows, columns = (
                round_up(t.shape[0] + batch * block, block) for t, block in ((q, query_block), (k, key_block))
            )
        else:
            batch, lead = q.shape[0], (q.shape[0],)
            rows, columns = round_up(q.shape[1], query_block), round_up(k.shape[1], key_block)
        # grad * out summed; log-sum-exp to base 2
        temporaries = [_float(q, *lead, heads, rows) for _ in range(2)]
        temporaries.append(_float(q, *lead, heads, rows * width))  # dQ
        if key_heads != heads:
            temporaries += [_float(q, *lead, key_heads, columns * width) for _ in range(2)]  # dK, dV
        blocks = ceil_div(rows if starts_q is not None else q.shape[1], query_block)
        temporaries.append(
            q.new_empty((blocks, batch, heads), dtype=torch.int32)
        )  # whose turn a tile of dQ is
        del temporaries
        return dq, dk, dv, None, None, None, None, None
