"""What torch's attention kernels take from the CUDA caching allocator, in order, besides what they return."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from harness.kernels.attention_choice import HALF_DTYPES
from harness.kernels.gpu import Gpu
from harness.kernels.operators import kernel
from harness.kernels.reductions import Kernel, reduce
from harness.kernels.script import Script, present, size_of
from harness.system import TorchRelease
from harness.units import ceil_div, round_up

FLOAT_BYTES = 4
CUDNN_ALIGNMENT_BYTES = 128
CUDNN_TILE = 128


@kernel("_scaled_dot_product_flash_attention")
def flash_forward(script: Script, query: Tensor, key: Tensor, dropout_p: float, gpu: Gpu) -> None:
    """Outputs 0 (attention), 1 (log-sum-exp), 6, 7 (random state).

    transformers/cuda/flash_attn/flash_api.cpp, mha_fwd. With few heads and rows the keys are split over
    several blocks, whose partial results are fp32 (set_params_splitkv, num_splits_heuristic).
    """
    script.output(0, 1)
    batch, heads, length, head_dim = query.shape
    splits = 1
    if dropout_p == 0:
        splits = flash_splits(batch * heads * ceil_div(length, 64), key.shape[2], head_dim, gpu)
    partial = FLOAT_BYTES * splits * batch * heads * length
    sums = script.take(partial if splits > 1 else 0)
    mixed = script.take(partial * flash_head_dim(head_dim) if splits > 1 else 0)
    if dropout_p > 0:  # the state is allocated twice, and the first one dropped
        state = script.take(16)
        script.output(7, 6)
        script.free(state)
    else:
        script.output(6, 7)
    script.free(sums, mixed)


def flash_splits(row_blocks: int, keys: int, head_dim: int, gpu: Gpu) -> int:
    """num_splits_heuristic: the fewest splits within 85 % of the best occupancy of 2 blocks per SM."""
    slots = 2 * gpu.sm_count
    if row_blocks >= 0.8 * slots:
        return 1
    key_blocks = ceil_div(keys, 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64)
    efficiencies: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = row_blocks * splits / slots
            efficiencies[splits] = waves / ceil_div(row_blocks * splits, slots)
    good_enough = 0.85 * max(efficiencies.values())
    return next(splits for splits, efficiency in efficiencies.items() if efficiency >= good_enough)


def flash_head_dim(head_dim: int) -> int:
    """The head dim the kernels work in (head_size_rounded)."""
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(script: Script, grad_out: Tensor, query: Tensor, key: Tensor, out: Tensor) -> None:
    """flash_api.cpp, mha_bwd.

    The incoming gradient and the output must be contiguous as (batch, length, heads, head_dim).
    """
    copies = [script.take(size_of(t)) for t in (grad_out, out) if not t.transpose(1, 2).is_contiguous()]
    script.output(0, 1, 2)
    batch, heads, length, head_dim = query.shape
    rows = round_up(length, 128)
    sums = script.take(FLOAT_BYTES * batch * heads * rows)
    query_grad = script.take(FLOAT_BYTES * batch * rows * heads * flash_head_dim(head_dim))
    grouped: list[int | None] = []
    if key.shape[1] != heads:  # a gradient per query head, summed over each group afterwards
        full = batch * key.shape[2] * heads * head_dim * query.dtype.itemsize
        grouped = [script.take(full), script.take(full)]
    script.free(*reversed(grouped), query_grad, sums, *reversed(copies))


def _no_log_sumexp(func: Any, args: Any, kwargs: Any) -> Any:
    """Without the log-sum-exp where no gradient needs it: torch's shape function has one, cuDNN does not."""
    if args[4] if len(args) > 4 else kwargs["compute_log_sumexp"]:
        return NotImplemented
    out, log_sum_exp, *others = func(*args, **kwargs)
    return out, log_sum_exp.new_empty(0), *others


@kernel("_scaled_dot_product_cudnn_attention", result=_no_log_sumexp)
def cudnn_forward(
    script: Script, query: Tensor, key: Tensor, compute_log_sumexp: bool, dropout_p: float, gpu: Gpu
) -> None:
    """Allocated in this order: seed, offset, attention, log-sum-exp, workspace.

    transformers/cuda/attention.cu, _cudnn_attention_forward; cudnn/MHA.cpp, run_cudnn_SDP_fprop.
    """
    script.output(6, 7, 0, *((1,) if compute_log_sumexp else ()))
    script.briefly(cudnn_plan_bytes([cudnn_dropout_bytes(query, key, dropout_p, gpu)], gpu))


@kernel("_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward")
def cudnn_backward(script: Script, query: Tensor, key: Tensor, dropout_p: float, gpu: Gpu) -> None:
    """cudnn/MHA.cpp, run_cudnn_SDP_bprop.

    One workspace: the frontend's fp32 accumulator of dQ and row sums (cudnn_frontend, SDPA backward node),
    then the plan's own: dK and dV for each query head where heads are grouped, and on Blackwell another
    accumulator of dQ where a short sequence is left to the kernels of Ampere.
    """
    script.output(0, 1, 2)
    batch, heads, length, head_dim = query.shape
    parts = [cudnn_dropout_bytes(query, key, dropout_p, gpu)]
    if key.shape[1] != heads:
        parts += [batch * heads * key.shape[2] * head_dim * query.dtype.itemsize] * 2
    shortest = key.shape[2] if gpu.torch.cudnn_backward_by_keys_alone else min(length, key.shape[2])
    if gpu.capability[0] > 9 and dropout_p == 0 and shortest <= CUDNN_TILE:
        parts.append(FLOAT_BYTES * batch * heads * round_up(length, 8) * head_dim)
    frontend = FLOAT_BYTES * batch * heads * length * (head_dim + 1)
    script.briefly(frontend + cudnn_plan_bytes(parts, gpu))


def cudnn_dropout_bytes(query: Tensor, key: Tensor, dropout_p: float, gpu: Gpu) -> int:
    """Bytes of the plan's dropout mask: none on Hopper, else one bit for each position of whole tiles."""
    if dropout_p == 0 or gpu.capability[0] == 9:
        return 0
    rows, columns = round_up(query.shape[2], CUDNN_TILE), round_up(key.shape[2], CUDNN_TILE)
    return query.shape[0] * query.shape[1] * rows * columns // 8


def cudnn_plan_bytes(parts: Sequence[int], gpu: Gpu) -> int:
    """Bytes that a plan of cuDNN with these parts asks for: aligned, with room to align the first; 0 for
    none.

    Hopper's kernels have one more small part of their own. No source is public; the plans of cuDNN 9.19 to
    9.26 for 1,400 random calls all have these sizes (tests/recordings/cudnn_plans).
    """
    own = [1] if gpu.capability[0] == 9 else []
    aligned = [round_up(part, CUDNN_ALIGNMENT_BYTES) for part in (*parts, *own) if part]
    return sum(aligned) + (CUDNN_ALIGNMENT_BYTES if aligned else 0)


def _host_seeds(func: Any, args: Any, kwargs: Any) -> Any:
    """With the dropout's seed and offset on the host; torch's shape function makes them on the device."""
    out, log_sum_exp, *seeds = func(*args, **kwargs)
    dropout_p = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
    if dropout_p > 0 or TorchRelease.of(torch.__version__).seeds_efficient_attention_always:
        seeds = [torch.empty((), dtype=torch.int64) for _ in seeds]
    return out, log_sum_exp, *seeds


@kernel("_scaled_dot_product_efficient_attention", result=_host_seeds)
def efficient_forward(
    script: Script, query: Tensor, value: Tensor, compute_log_sumexp: bool, dropout_p: float, gpu: Gpu
) -> None:
    """Outputs 0 (attention), 1 (log-sum-exp), 2 and 3 (seed and offset, with dropout host tensors).

    transformers/cuda/attention.cu, _efficient_attention_forward: 16-bit results wider than 128 cannot stay
    in registers and are accumulated in an fp32 buffer (kNeedsOutputAccumulatorBuffer).
    """
    if dropout_p == 0 and not gpu.torch.seeds_efficient_attention_always:
        script.output(2, 3)
    script.output(0, *((1,) if compute_log_sumexp else ()))
    if query.dtype in HALF_DTYPES and value.shape[3] > 128:
        script.briefly(FLOAT_BYTES * prod(query.shape[:3]) * value.shape[3])


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    script: Script,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    outputs: Sequence[Any],
    gpu: Gpu,
) -> None:
    """transformers/cuda/attention_backward.cu. The last output is the gradient of a mask, if it has one.

    "delta", the row sums of grad * attention: computed by the kernel for 16-bit inputs, by four ATen
    operators in fp32 for fp32 inputs. Then the workspace.
    """
    grad = grad_out_
    copy = None if grad.transpose(1, 2).is_contiguous() else script.take(size_of(grad))
    script.output(*present(outputs))
    batch, heads, length, _ = query.shape
    grouped: list[int | None] = []
    if key.shape[1] != heads:  # since 2.14: a gradient per query head, summed over each group afterwards
        grouped = [script.take(size_of(t) // t.shape[1] * heads) for t in (key, value)]
    delta_bytes = FLOAT_BYTES * batch * heads * length
    if query.dtype in HALF_DTYPES:
        delta = script.take(delta_bytes)
    else:
        products = script.take(FLOAT_BYTES * prod(grad.shape))
        sums = script.take(delta_bytes)
        as_rows = grad.new_empty((batch, length, heads, grad.shape[3]), dtype=torch.float32)
        reduce(script, as_rows, (3,), torch.float32, Kernel(FLOAT_BYTES), gpu)
        if heads == 1 or length == 1:  # its transposition is contiguous already
            script.free(products)
            delta = sums
        else:
            delta = script.take(delta_bytes)
            script.free(sums, products)
    workspace = script.take(efficient_workspace(query, key, value, dropout_p, gpu), workspace=True)
    script.free(delta, workspace, *reversed(grouped), copy)


def efficient_workspace(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, gpu: Gpu) -> int:
    """Bytes in which the gradients are staged (mem_eff_attention/kernel_backward.h, workspace_size).

    Each block of queries has a lock (16 B) and an fp32 tile of dQ. 16-bit dK and dV wider than the kernel's
    registers get fp32 tiles too, one per split of the keys. Which kernel: dispatch_cutlassB in
    mem_eff_attention/kernels/cutlassB.h takes the first whose head dim and shared memory fit.
    """
    batch, heads, length, _ = query.shape
    width = max(query.shape[3], value.shape[3])
    half = query.dtype in HALF_DTYPES
    shared_memory = gpu.capability in ((8, 0), (8, 7)) or 9 <= gpu.capability[0] <= 11
    query_block, tile_width, in_registers = 64, 64, True
    if width > 64 and half:
        if width > 128:
            query_block, in_registers = 128, False
        elif shared_memory:
            query_block, tile_width = 128, 128
        elif gpu.capability[0] == 7 or (
            width <= 96 and dropout_p == 0 and gpu.capability in ((8, 6), (8, 9))
        ):
            query_block = 128
        else:
            in_registers = False
    elif width > 64 and shared_memory:
        query_block = 128
    tiles = ceil_div(length, query_block) * ceil_div(query.shape[3], tile_width)
    elements = tiles * (query_block * tile_width + 4)
    if not in_registers:
        key_block = 64
        splits = max(1, min(ceil_div(key.shape[2], key_block), 200 // (batch * heads)))
        if heads * batch >= 256 and key.shape[2] <= 2 * key_block:
            splits = 1
        for head_dim in (query.shape[3], value.shape[3]):
            elements += splits * key_block * round_up(head_dim, query_block)
    return batch * heads * round_up(elements, 4) * FLOAT_BYTES


@kernel("_safe_softmax", again=3)
def safe_softmax(script: Script, self: Tensor, dim: int, gpu: Gpu) -> None:
    """transformers/attention.cpp, the math kernel's softmax: rows that are all -inf give 0. Four kernels: the
    softmax, which scores are -inf, whether all of a row, and the result again with 0 for such rows."""
    script.output(0)
    masked = script.take(self.numel())
    rows = script.take(self.numel() // max(1, self.shape[dim]))
    reduce(script, self.new_empty(self.shape, dtype=torch.bool), (dim,), torch.bool, Kernel(1), gpu)
    zero = script.take(self.dtype.itemsize)
    script.free(zero, rows, masked)
