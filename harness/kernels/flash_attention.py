"""What the flash-attn package allocates inside its operators."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from harness.kernels.attention import FLOAT_BYTES, flash_head_dim, flash_splits
from harness.kernels.gpu import Gpu
from harness.kernels.operators import kernel
from harness.kernels.script import Script, size_of
from harness.units import ceil_div, round_up

WIDTHS_3 = (64, 96, 128, 192, 256)
"""Head dims flash-attn 3 has kernels for (round_up_headdim)."""


@kernel("harness::flash_attention")
def forward(
    script: Script,
    query: Tensor,
    key: Tensor,
    starts: Tensor | None,
    dropout_p: float,
    causal: bool,
    local: bool,
    version: int,
    outputs: Sequence[Any],
    gpu: Gpu,
) -> None:
    """mha_fwd and mha_varlen_fwd.

    Version 2 splits the keys of a batch as torch's copy of it does. Version 3 (num_splits=1) allocates its
    tile scheduler's counters: a semaphore, and vectors of one number a document, rounded up to 4 numbers.
    Version 4 (_flash_attn_fwd) allocates nothing beside its outputs, up to 256 documents.
    """
    script.output(0, 1)
    if version == 4:
        return
    if version == 3:
        varlen, masked = starts is not None, causal or local
        batch = query.shape[0] if starts is None else starts.shape[0] - 1
        counted = varlen or (masked if gpu.capability >= (9, 0) else causal)
        vectors = 2 * varlen + (not local) + masked
        semaphore = gpu.capability >= (9, 0) or not varlen
        script.briefly(4 * (round_up(batch, 4) * vectors + semaphore) if counted else 0)
        return
    splits = 1
    if starts is None and dropout_p == 0:
        batch, length, heads, head_dim = query.shape
        splits = flash_splits(batch * heads * ceil_div(length, 64), key.shape[1], head_dim, gpu)
    partial_bytes = splits * size_of(outputs[1]) if splits > 1 else 0
    sums = script.take(partial_bytes)
    mixed = script.take(partial_bytes * flash_head_dim(query.shape[-1]))
    script.output(2)
    script.free(mixed, sums)


@kernel("harness::flash_attention_backward")
def backward(
    script: Script,
    query: Tensor,
    key: Tensor,
    starts: Tensor | None,
    longest: int,
    causal: bool,
    local: bool,
    capped: bool,
    deterministic: bool,
    version: int,
    gpu: Gpu,
) -> None:
    """mha_bwd, mha_varlen_bwd, _flash_attn_bwd: row sums of grad * out, an fp32 dQ, and more by version.

    Version 2: rows are rounded up to 128; packed documents get 128 more each. With grouped heads there are dK
    and dV of every query head, summed over the group afterwards; deterministic, a dQ for each split of keys.

    Version 3: also log-sum-exp to base 2, fp32 dK and dV of grouped heads, and semaphores that say whose turn
    a tile of dQ is. Rows and columns are rounded up to the kernel's blocks; packed documents get a block more
    each.

    Version 4: the same with blocks of its own, and with semaphores for deterministic sums alone. On
    Blackwell two blocks of columns may work together, and columns are a multiple of both. A head dim of 256
    has a kernel there that needs no sums in fp32.
    """
    heads, groups, head_dim = query.shape[-2], key.shape[-2], query.shape[-1]
    batch = query.shape[0] if starts is None else starts.shape[0] - 1
    if version == 2:
        rows = batch * round_up(query.shape[1], 128) if starts is None else query.shape[0] + 128 * batch
        parts = ceil_div(gpu.sm_count, batch * heads) if deterministic else 1
        taken = [FLOAT_BYTES * heads * rows, FLOAT_BYTES * parts * rows * heads * flash_head_dim(head_dim)]
        taken += 2 * [size_of(key) // groups * heads] if groups != heads else []
    else:
        newest = version == 4
        of_3 = blocks_3(head_dim, causal, local, capped, gpu)
        width, *blocks = blocks_4(head_dim, causal or local, gpu) if newest else of_3
        together = 2 if newest and gpu.capability[0] in (10, 11) and head_dim >= 128 else 1
        rows, columns = (
            batch * round_up(t.shape[1], block)
            if starts is None
            else round_up(t.shape[0] + batch * block, block)
            for t, block in zip((query, key), (blocks[0], blocks[1] * together), strict=True)
        )
        in_place = together == 2 and head_dim == 256
        row_sums = 2 * [FLOAT_BYTES * heads * rows]
        sums = [] if in_place else [FLOAT_BYTES * heads * rows * width]
        taken = [*sums, *row_sums] if newest else [*row_sums, *sums]
        taken += 2 * [FLOAT_BYTES * groups * columns * width] if groups != heads and not in_place else []
        semaphores = 4 * ceil_div(query.shape[1] if starts is None else longest, blocks[0]) * batch * heads
        taken += [semaphores * together] if deterministic or not newest else []
        if groups != heads and deterministic:
            tiles = round_up(longest, blocks[1] * together) // blocks[1]
            taken += 2 * [4 * tiles * batch * groups * (1 + newest)]
    script.free(*reversed([script.take(size_bytes) for size_bytes in taken]))


def blocks_4(head_dim: int, masked: bool, gpu: Gpu) -> tuple[int, int, int]:
    """The head dim flash-attn 4 sums in, and a block's rows and columns (_flash_attn_bwd)."""
    blocks = {9: _blocks_of_hopper(head_dim, masked), 12: (64, 64)}
    return round_up(head_dim, 32), *blocks.get(gpu.capability[0], (128, 128))


def _blocks_of_hopper(head_dim: int, masked: bool) -> tuple[int, int]:
    """_tile_size_bwd_sm90."""
    if head_dim <= 64:
        return 128, 128
    if head_dim <= 128:
        return 80 if head_dim > 96 and not masked else 64, 128
    return 64, 96 if head_dim <= 192 else 64


def blocks_3(head_dim: int, causal: bool, local: bool, capped: bool, gpu: Gpu) -> tuple[int, int, int]:
    """The head dim flash-attn 3 computes in, and a block's rows and columns (mha_bwd, kBlockM, kBlockN)."""
    size = next(n for n, width in enumerate(WIDTHS_3) if width >= head_dim)
    if gpu.capability in ((8, 6), (8, 9)):
        rows, columns = (64, 64, 64, 64, 32), (128, 128, 96, 64, 64)
    elif gpu.capability < (9, 0):
        rows, columns = (128, 64, 64, 64, 64), (128, 128, 128, 80, 64)
    else:
        all_pairs = not (causal or local or capped)
        rows = (96 if causal and capped and not local else 128, 64, 80 if all_pairs else 64, 64, 64)
        columns = (128, 128, 128, 96, 80)
    return WIDTHS_3[size], rows[size], columns[size]
