"""What FSDP's copies take on CUDA, each size worked out by hand from native/cuda/TensorShape.cu."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from harness.kernels import Gpu, Take, script_of, unknown_ops
from harness.system import TorchRelease

assert fully_shard  # whose import defines the operators
H100 = Gpu((9, 0), 132, TorchRelease(2, 13))
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def taken(func: Any, *args: Any, **named: Any) -> list[int]:
    return [step.size_bytes for step in script_of(func, args, named, None, H100) if isinstance(step, Take)]


def test_copying_out_sends_five_lists_of_integers() -> None:
    """Two weights of 2**20 and 2048 elements a rank, 8 ranks. With a block for 2048 bytes there would be
    (1024 + 2) x 8 = 8208 blocks, and a device runs at most 132 x 2048 / 128 x 2 = 4224: so a thread copies
    2 pieces, 2 chunks a block and 1 piece of each. 3 addresses or sizes a weight, 1026 + 3 numbers of blocks.
    """
    func = torch.ops.fsdp.split_with_sizes_copy.default
    sizes = [2**20, 2048]
    gathered = meta(8, sum(sizes))
    out = [meta(8, size) for size in sizes]
    assert taken(func, gathered, sizes, 1, out=out) == [8 * (3 * 2 + (1024 + 2) + 3)]


def test_many_bytes_are_copied_out_by_larger_blocks() -> None:
    """2**23 elements a rank: 8192 x 8 / 4224 = 16 pieces a thread, 4 chunks a block and 4 pieces of each."""
    func = torch.ops.fsdp.split_with_sizes_copy.default
    out = [meta(8, 2**23)]
    assert taken(func, meta(8, 2**23), [2**23], 1, out=out) == [8 * (3 + 8192 // 4 + 2)]


def test_copying_in_sends_seven_lists_of_integers() -> None:
    """(16, 512) and (512) among 8 ranks, in fp32: 4096 and 256 bytes a rank, 2 and 1 blocks."""
    func = torch.ops.fsdp.chunk_cat.default
    gradients = [meta(16, 512), meta(512)]
    whole = meta(8, 1024 + 64, dtype=FP32)
    assert taken(func, gradients, 0, 8, out=whole) == [8 * (4 * 2 + 2 * (2 + 1) + 3)]


def test_gradients_in_fp16_that_are_summed_in_fp32_are_filled_up_one_by_one() -> None:
    """native/TensorShape.cpp, _pad_chunk: 15 rows become 16; 16 rows stay what they are."""
    func = torch.ops.fsdp.chunk_cat.default
    gradients = [meta(15, 512, dtype=FP16), meta(16, 512, dtype=FP16)]
    assert taken(func, gradients, 0, 8, out=meta(8, 2048, dtype=FP32)) == [16 * 512 * 2]


def test_every_operator_of_fsdp_is_known() -> None:
    names = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
    assert unknown_ops([f"fsdp::{name}" for name in names]) == []
