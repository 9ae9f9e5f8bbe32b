"""Short convolutions and triangular systems: as PyTorch's CUDA build 2.13 allocates them.

Each was called alone on a virtual GPU (h100), under torch.cuda.memory._record_memory_history.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kernels import Unknown, script_of, unknown_ops
from tests.kernels.test_rules import BF16, H100, meta, written

aten = torch.ops.aten


def _transposed(*shape: int) -> Tensor:
    return meta(*shape, dtype=BF16).transpose(1, 2)


X, X_TRANSPOSED = meta(4, 544, 128, dtype=BF16), _transposed(4, 128, 544)
G, G_TRANSPOSED = meta(4, 544, 131, dtype=BF16), _transposed(4, 131, 544)
WEIGHT, BIAS = meta(544, 1, 4, dtype=BF16), meta(544, dtype=BF16)
SHORT = ([1], [3], [1], False, [0], 544)
"""stride, padding, dilation, transposed, output padding, groups: one channel a group."""


def _script(func: Any, *args: Any) -> str:
    return written(script_of(func, args, {}, func(*args), H100))


# recorded: +557056 +570112 -557056 and +570112
@pytest.mark.parametrize(("x", "script"), [(X_TRANSPOSED, "+557056 =0 -0"), (X, "=0")])
def test_forward_copies_what_is_not_contiguous(x: Tensor, script: str) -> None:
    assert _script(aten.convolution.default, x, WEIGHT, BIAS, *SHORT) == script


@pytest.mark.parametrize(
    ("gradient", "x", "mask", "script"),
    [
        (G, X, (True, True, True), "=1 =0 =2"),  # +4352 +557056 +1088
        (G, X_TRANSPOSED, (True, True, True), "+557056 =1 =0 =2 -0"),  # +557056 +4352 +557056 +1088 -557056
        # +557056 +570112 +4352 +557056 -570112 +1088 -557056
        (G_TRANSPOSED, X_TRANSPOSED, (True, True, True), "+557056 +570112 =1 =0 -1 =2 -0"),
        (G_TRANSPOSED, X_TRANSPOSED, (True, False, False), "+557056 +570112 =0 -1 -0"),
        (G_TRANSPOSED, X_TRANSPOSED, (False, True, False), "+557056 +570112 =1 -1 -0"),
    ],
)
def test_backward_makes_the_gradient_of_the_weight_first(
    gradient: Tensor, x: Tensor, mask: tuple[bool, ...], script: str
) -> None:
    func = aten.convolution_backward.default
    assert _script(func, gradient, x, WEIGHT, [544], *SHORT, list(mask)) == script


def test_a_dense_convolution_is_named_as_unknown() -> None:
    args = (meta(4, 256, 128), meta(320, 256, 3), None, [1], [1], [1], False, [0], 1)
    func = aten.convolution.default
    (step,) = script_of(func, args, {}, func(*args), H100)
    assert isinstance(step, Unknown)
    assert unknown_ops(["aten::convolution", f"aten::convolution ({step.how})"]) == [
        f"aten::convolution ({step.how})"
    ]


# recorded of 4 x 8 systems of 64: +1048576 +256 +256 -256 -256
@pytest.mark.parametrize(
    ("batch", "size", "script"),
    [((4, 8), 64, "=0 +256 +256 -0 -1"), ((2, 4), 64, "=0"), ((2, 4), 32, "=0 +64 +64 -0 -1")],
)
def test_many_systems_are_found_by_addresses(batch: tuple[int, ...], size: int, script: str) -> None:
    func = aten.linalg_solve_triangular.default
    args = (meta(*batch, size, size), meta(*batch, size, 128))
    made = func(*args, upper=False)
    assert written(script_of(func, args, {"upper": False}, made, H100)) == script
