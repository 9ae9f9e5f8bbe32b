"""How kernels walk through their tensors, by operators whose kernels a profiler named on an H100."""

import pytest
import torch
from torch import Tensor

from harness.hardware import find_hardware
from harness.kernel_time import memory, product
from harness.kernels.cost import operator_cost
from harness.kernels.walks import walk_of

aten = torch.ops.aten
H200 = find_hardware("h200")
H100 = find_hardware("h100")
BF16, FP32 = torch.bfloat16, torch.float32


def on_device(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


HIDDEN, WIDE = on_device(1, 2048, 4096), on_device(1, 2048, 4096, dtype=FP32)
QUERY = on_device(1, 2048, 32, 128).transpose(1, 2)
WALKS = {
    # vectorized_elementwise_kernel
    "alike": (aten.add.Tensor, (HIDDEN, HIDDEN), None),
    "transposed alike": (aten.neg.default, (QUERY,), None),
    "with a number": (aten.mul.Tensor, (HIDDEN, torch.empty((), device="meta")), None),
    "to 16 bit": (aten._to_copy.default, (WIDE, BF16), None),
    "into 16 bit": (aten.copy_.default, (HIDDEN, WIDE), None),
    "compared": (aten.gt.Scalar, (HIDDEN, 0), None),
    # unrolled_elementwise_kernel
    "to 32 bit": (aten._to_copy.default, (HIDDEN, FP32), "cast"),
    "of both": (aten.add.Tensor, (WIDE, HIDDEN), "cast"),
    # elementwise_kernel
    "a weight of each column": (aten.mul.Tensor, (HIDDEN, on_device(4096)), "strided_16"),
    "a norm of each row": (aten.mul.Tensor, (WIDE, on_device(1, 2048, 1, dtype=FP32)), "strided"),
    "rotated": (aten.mul.Tensor, (QUERY, on_device(1, 1, 2048, 128)), "strided_16"),
    "half of it": (aten.neg.default, (QUERY[..., :64],), "strided_16"),
    # others
    "halves together": (aten.cat.default, ([QUERY[..., :64], QUERY[..., 64:]], -1), "cat"),
    "wholes together": (aten.cat.default, ([HIDDEN, HIDDEN],), None),
    "a sum": (aten.sum.dim_IntList, (WIDE, [2]), "reduction"),
    "a list": (aten._foreach_mul_.Scalar, ([HIDDEN], 2.0), "foreach"),
}


def called(func, args) -> Tensor:
    if func is aten._to_copy.default:
        return func(args[0], dtype=args[1])
    return func(*args)


@pytest.mark.parametrize(("func", "args", "walk"), WALKS.values(), ids=WALKS)
def test_a_walk_follows_from_layouts_and_dtypes(func, args, walk) -> None:
    assert walk_of(func, args, called(func, args)) == walk


def test_one_that_computes_the_place_of_every_element_takes_twice_as_long() -> None:
    weight = on_device(4096)
    side_by_side = operator_cost(H100, aten.mul.Tensor, (HIDDEN, HIDDEN), {}, HIDDEN)
    broadcast = operator_cost(H100, aten.mul.Tensor, (HIDDEN, weight), {}, HIDDEN)
    assert broadcast.bytes_moved < side_by_side.bytes_moved
    assert 20e-6 < broadcast.missed_s < 24e-6  # 21 us on an H100 (profiles/h100/kernels.csv.gz)
    assert side_by_side.held_s < broadcast.held_s < broadcast.missed_s
    assert memory(H100, "strided_16", 2**26) > 1.5 * memory(H100, "elementwise", 2**26)


def test_a_walk_and_the_memory_limit_a_kernel_together() -> None:
    """An H200 has an H100's multiprocessors and 1.43 times its bandwidth: a cast of 8 million numbers took
    25.6 us on the one and 22.4 us on the other (profiles/<device>/kernels.csv.gz)."""
    bf16, fp32 = on_device(1, 2048, 4096), on_device(1, 2048, 4096, dtype=FP32)
    casts = [operator_cost(gpu, aten.copy_.default, (fp32, bf16), {}, fp32) for gpu in (H100, H200)]
    assert [cost.missed_s * 1e6 for cost in casts] == pytest.approx([25.6, 22.4], rel=0.1)
    assert casts[0].missed_s / casts[1].missed_s < 1.43 * 0.9


def test_lists_of_weights_take_a_time_for_each_element() -> None:
    """Of Llama-3.2-1B's weights, _foreach_add_ and _foreach_addcdiv_ (profiles/<device>/kernels.csv.gz)."""
    weights = 1_235_814_400
    for width, passes, h100_us, h200_us in ((2, 2, 2087, 1649), (2, 4, 3568, 2646), (4, 4, 6912, 4982)):
        moved = weights * width * passes
        took = [memory(gpu, "foreach", moved, held_share=0.0, elements=weights) for gpu in (H100, H200)]
        assert [seconds * 1e6 for seconds in took] == pytest.approx([h100_us, h200_us], rel=0.06)


def test_rows_that_do_not_begin_on_16_bytes_are_multiplied_slowly() -> None:
    """An H100 took 8.7 ms for the head of GPT-2 medium with 8,192 tokens (profiles/h100/kernels.csv.gz)."""
    took = {}
    for words in (50257, 50304):
        hidden, head = on_device(8192, 1024), on_device(words, 1024).t()
        out = on_device(8192, words)
        took[words] = operator_cost(H100, aten.mm.default, (hidden, head), {}, out).compute_s
    assert took[50304] == product(H100, "bf16", 8192, 50304, 1024)
    assert took[50257] > 4 * took[50304]
    # of one row there is none to begin elsewhere
    cost = operator_cost(
        H100, aten.mm.default, (on_device(1, 1023), on_device(1023, 1024)), {}, on_device(1, 1024)
    )
    assert cost.seconds < 1e-4
