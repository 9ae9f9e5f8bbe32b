"""What a convolution takes: as long as the product that it is, by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hardware import Hardware, find_hardware
from harness.kernel_time import memory, product
from harness.kernels.operator_time import OperatorTime, dtype_of_products
from harness.kernels.operator_time import operator_time as time_of
from harness.observe import operator_flops

A100, V100 = find_hardware("a100-80gb"), find_hardware("v100-16gb")
ROWS, SIDE, CHANNELS = 8, 28, 128
POSITIONS = ROWS * SIDE * SIDE
aten = torch.ops.aten


def images(last: bool = True, dtype: torch.dtype = torch.float16) -> Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(ROWS, CHANNELS, SIDE, SIDE, device="meta", dtype=dtype, memory_format=layout)


def took(func: Any, args: list[Any], out: Any, moved: int = 1, device: Hardware = A100) -> OperatorTime:
    return time_of(func, args, {}, out, device, operator_flops(func, args, {}, out), moved, 0)


def forward_s(given: Tensor, filter: int = 1, device: Hardware = A100) -> float:
    weight = torch.empty(CHANNELS, CHANNELS, filter, filter, device="meta", dtype=given.dtype)
    pad = [filter // 2] * 2
    args = [given, weight, None, [1, 1], pad, [1, 1], False, [0, 0], 1]
    return took(aten.convolution.default, args, given, device=device).seconds  # the result lies as the input


@pytest.mark.parametrize("filter", [1, 3])
def test_it_takes_as_long_as_its_product(filter: int):
    expected = product(A100, "fp16", POSITIONS, CHANNELS, CHANNELS * filter * filter)
    assert forward_s(images(), filter) == expected


def test_tensors_without_channels_last_are_transposed_first():
    copied = 2 * 2 * 2 * POSITIONS * CHANNELS  # both sides read and written once, 2 bytes each
    assert forward_s(images(last=False)) == forward_s(images()) + memory(A100, "copy", copied)


def test_its_gradients_are_the_products_with_the_roles_exchanged():
    given, weight = images(), torch.empty(CHANNELS, CHANNELS, 3, 3, device="meta", dtype=torch.float16)
    sizes = [[0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    backward = aten.convolution_backward.default
    by_input, by_weight = [
        took(backward, [given, given, weight, *sizes, asked], (given, weight)).seconds
        for asked in ([True, False, False], [False, True, False])
    ]
    assert by_input == product(A100, "fp16", POSITIONS, CHANNELS, CHANNELS * 9)
    assert by_weight == product(A100, "fp16", CHANNELS, CHANNELS * 9, POSITIONS)


def test_one_channel_a_group_waits_for_memory():
    given = images()
    weight = torch.empty(CHANNELS, 1, 3, 3, device="meta", dtype=torch.float16)
    args = [given, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], CHANNELS]
    found = took(aten.convolution.default, args, given, moved=10**8)
    assert not found.computes
    assert found.seconds == memory(A100, "elementwise", 10**8)


def test_fp32_is_multiplied_in_tf32_where_there_are_units_and_the_program_allows():
    """PyTorch allows it for convolutions from the beginning, and for matrices when it is asked to."""
    given, sizes = images(dtype=torch.float32), (POSITIONS, CHANNELS, CHANNELS * 9)
    assert forward_s(given, 3) == product(A100, "tf32", *sizes)
    assert forward_s(given, 3, device=V100) == product(V100, "fp32", *sizes)
    assert dtype_of_products(torch.float32, A100) == "fp32"
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert dtype_of_products(torch.float32, A100) == "tf32"
        assert dtype_of_products(torch.float32, V100) == "fp32"
        assert dtype_of_products(torch.bfloat16, A100) == "bf16"
        assert forward_s(given, 3) == product(A100, "fp32", *sizes)
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before
