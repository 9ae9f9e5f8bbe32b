"""Which kernel torch's scaled_dot_product_attention runs on CUDA, decided from shapes alone.

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h (torch 2.11
to 2.15, Linux, dense tensors); each check below carries the name it has there. They were compared with the
answers of torch's own `_fused_sdp_choice` in the cu130 builds of every one of these versions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from harness.system import TorchRelease

Backend = Literal["flash", "efficient", "cudnn", "math"]

HALF_DTYPES = (torch.float16, torch.bfloat16)
CUDNN_DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
LARGEST_GRID_DIMENSION = 65535


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What the checks look at in one call. Shapes are (batch, heads, length, head_dim), as SDPA takes them,
    of dense tensors with a contiguous last dimension.

    The mask's dtype changes nothing: it is converted afterwards.
    """

    query: Sequence[int]
    key: Sequence[int]
    value: Sequence[int]
    dtype: torch.dtype
    mask: Sequence[int] | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    requires_grad: bool
    mask_requires_grad: bool = False
    capability: tuple[int, int]
    torch: TorchRelease


def chosen_backend(call: AttentionCall, *, cudnn_deprioritized: bool = False) -> Backend:
    """The kernel F.scaled_dot_product_attention runs.

    `cudnn_deprioritized`: the environment variable CUDNN_DEPRIORITIZED is "1" (no other value counts).
    """
    checks = {"cudnn": can_use_cudnn, "flash": can_use_flash, "efficient": can_use_efficient}
    order: tuple[Backend, ...] = ("flash", "efficient")  # Context.h, sdp_priority_order
    if prefers_cudnn(call) and not cudnn_deprioritized:
        order = ("cudnn", *order)
    for backend in order:
        if checks[backend](call):
            return backend
    return "math"


def prefers_cudnn(call: AttentionCall) -> bool:
    """check_prefer_cudnn_attention: cuDNN newer than 9.15.0 on Hopper and data-center Blackwell.

    In CUDA 12 builds of any version, compute capability 10.x must be 10.0 or 10.3.
    """
    major, minor = call.capability
    known = call.torch.every_gpu_10_prefers_cudnn or minor in (0, 3)
    return call.torch.cudnn_version > 91500 and major in (9, 10) and known


def can_use_flash(call: AttentionCall) -> bool:
    """can_use_flash_attention. FlashAttention-2; there is no mask argument at all."""
    head_dim = call.query[-1]
    return (
        _four_dimensional(call)
        and call.mask is None  # check_for_attn_mask
        and _one_head_dim(call)
        and head_dim <= 256  # check_head_dim_size_flash
        and (8, 0) <= call.capability <= (12, 1)  # check_flash_attention_hardware_support
        and not _backward_too_large(call)
        # check_flash_causal_non_square_seqlens: FlashAttention-2 aligns the causal mask to the last key
        and not (call.is_causal and call.query[2] != call.key[2])
        and call.dtype in HALF_DTYPES  # check_dtypes_flash_attention
        and _heads_match(call, supports_gqa=True)
        and _nonempty(call)
        and _grid_fits(call)
    )


def can_use_efficient(call: AttentionCall) -> bool:
    """can_use_mem_efficient_attention. The CUTLASS kernels of xFormers."""
    alignment = minimum_gemm_alignment(call.dtype, call.capability)
    dtypes = (*HALF_DTYPES, torch.float32) if call.capability >= (8, 0) else (torch.float16, torch.float32)
    return (
        _four_dimensional(call)
        and (5, 0) <= call.capability <= (12, 1)  # check_mem_efficient_hardware_support
        and call.query[-1] == call.key[-1]  # check_head_dim_size_mem_efficient, also the next two
        and call.query[-1] % alignment == 0 < call.query[-1]
        and call.value[-1] % alignment == 0 < call.value[-1]
        and _nonempty(call)
        # check_batch_size_and_num_heads_dense
        and _heads_match(call, supports_gqa=call.torch.efficient_attention_groups_heads)
        and call.dtype in dtypes
    )


def can_use_cudnn(call: AttentionCall) -> bool:
    """can_use_cudnn_attention."""
    dropout = call.dropout_p
    return (
        not (dropout > 0 and 91100 < call.torch.cudnn_version < 91400)
        and _four_dimensional(call)
        and call.dtype in HALF_DTYPES  # check_dtypes_low_precision
        and _mask_broadcasts(call)
        and not call.mask_requires_grad  # check_attn_mask_shape
        and (8, 0) <= call.capability <= (12, 1)  # check_cudnn_hardware_support
        and (not call.torch.checks_cudnn_dropout or dropout * 16 == math.floor(dropout * 16))
        and _nonempty(call)
        and _heads_match(call, supports_gqa=True)
        and _cudnn_takes_shapes(call)
    )


def minimum_gemm_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Elements the head dim must be a multiple of in the efficient kernels (minimum_gemm_alignment)."""
    half = dtype in HALF_DTYPES
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)  # use_tensor_cores
    return max(4 if capability >= (8, 0) else 1, 128 // (16 if half else 32) if tensor_cores else 1)


def _four_dimensional(call: AttentionCall) -> bool:  # check_tensor_shapes
    return len(call.query) == len(call.key) == len(call.value) == 4


def _nonempty(call: AttentionCall) -> bool:  # check_nonzero_sequence_lengths_dense
    return call.query[2] > 0 and call.key[2] > 0


def _one_head_dim(call: AttentionCall) -> bool:
    return call.query[-1] == call.key[-1] == call.value[-1]


def _heads_match(call: AttentionCall, *, supports_gqa: bool) -> bool:
    # check_batch_size_and_num_heads_dense and check_grouped_query_attention
    if not call.query[0] == call.key[0] == call.value[0]:
        return False
    query, key, value = call.query[1], call.key[1], call.value[1]
    if call.enable_gqa and supports_gqa:
        return key == value and query % key == 0
    if call.torch.efficient_attention_groups_heads and key == value == 1:  # one key-value head broadcasts
        return query > 0
    return query == key == value


def _backward_too_large(call: AttentionCall) -> bool:
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: too little shared memory
    small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    head_dim = call.query[-1]
    return call.requires_grad and small and (192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0))


def _grid_fits(call: AttentionCall) -> bool:
    return not call.torch.checks_flash_grid or max(call.query[0], call.query[1]) <= LARGEST_GRID_DIMENSION


def _mask_broadcasts(call: AttentionCall) -> bool:  # check_attn_mask_shape
    mask = call.mask
    if mask is None:
        return True
    batch, heads, length, _ = call.query
    scores = (batch, heads, length, call.key[2])[-len(mask) :]
    return len(mask) in (2, 4) and all(size in (1, full) for size, full in zip(mask, scores, strict=True))


def _cudnn_takes_shapes(call: AttentionCall) -> bool:
    # check_cudnn_tensor_shapes, with the branches for a cuDNN older than 9.1 left out
    batch, heads, length, head_dim = call.query
    value_dim = call.value[-1]
    if call.torch.checks_cudnn_grid and max(batch, heads) > LARGEST_GRID_DIMENSION:
        return False
    if max(head_dim, value_dim) > _cudnn_head_dim_limit(call) or head_dim % 8 or value_dim % 8:
        return False
    if not _cudnn_backward_exists(call):
        return False
    return call.key[2] != 1 and not (length == 1 and (call.dropout_p > 0 or _no_single_query(call)))


def _no_single_query(call: AttentionCall) -> bool:
    return (
        call.torch.refuses_single_queries_to_cudnn
        and call.capability[0] == 10
        and 92200 < call.torch.cudnn_version <= 92500
    )


def _cudnn_head_dim_limit(call: AttentionCall) -> int:
    dims = (call.query[-1], call.value[-1])
    hopper, blackwell = call.capability == (9, 0), call.capability[0] == 10
    if not call.torch.knows_cudnn_head_dim_256:
        if hopper and call.torch.cudnn_version >= 91000:
            return 256
        return 192 if blackwell and call.torch.cudnn_version >= 91100 and dims == (192, 128) else 128
    if _cudnn_has_256(call):
        return 256
    return 192 if (hopper or blackwell) and call.torch.cudnn_version >= 91100 and dims == (192, 128) else 128


def _cudnn_has_256(call: AttentionCall) -> bool:
    if call.capability[0] == 10 and call.capability[1] == 7:
        return call.torch.cudnn_version > 92500
    return (call.capability == (9, 0) or call.capability[0] == 10) and call.torch.cudnn_version > 92200


def _cudnn_backward_exists(call: AttentionCall) -> bool:
    # check_cudnn_d256_bprop_head_dim: above 128, training knows two pairs of head dims only
    if not call.torch.knows_cudnn_head_dim_256 or not call.requires_grad or not _cudnn_has_256(call):
        return True
    dims = (call.query[-1], call.value[-1])
    return max(dims) <= 128 or dims in ((192, 128), (256, 256))
